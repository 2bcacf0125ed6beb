"""The page and its JSON API, mounted on the Flask app of whichever server shows them."""
