"""Everything that imports paddle: finding the model, its batches, its labels and its steps."""
