"""Lets tensor, pipeline and mixed parallelism run on CPUs, for tests: Paddle's gloo lacks some of it.

`install()` before `fleet.init`. Each patch says what stock Paddle 3.3 does not do there. Numbers of tokens
do not depend on any of it.
"""

from __future__ import annotations

from typing import Any

import paddle
import paddle.distributed as dist
import paddle.nn.functional as F
from paddle import _C_ops
from paddle.base import core
from paddle.distributed import collective, fleet, parallel
from paddle.distributed.fleet.layers.mpu import mp_ops
from paddle.distributed.fleet.meta_parallel import pipeline_parallel, tensor_parallel
from paddle.distributed.fleet.utils import hybrid_parallel_util


def install() -> None:
    """Put the patches in, for the rest of the process."""
    parallel.ParallelEnv._device_id = 0  # a pipeline asks for the number of its accelerator
    _communicate_without_streams()
    _tensor_parallel_operations()
    for module in (hybrid_parallel_util, tensor_parallel, pipeline_parallel):
        if hasattr(module, "broadcast_input_data"):  # asserts an accelerator
            module.broadcast_input_data = _broadcast_input_data
    collective.new_group = dist.new_group = _new_group(collective.new_group)


def _communicate_without_streams() -> None:
    """Of a process group gloo has the plain calls, and not those on a device's stream."""
    group = core.ProcessGroup

    def done(task: Any) -> Any:
        task.wait()
        return task

    group.all_reduce_on_calc_stream = lambda self, tensor, op=dist.ReduceOp.SUM, *_: done(
        self.all_reduce(tensor, op, True)
    )
    group.broadcast_on_calc_stream = lambda self, tensor, source, *_: done(
        self.broadcast(tensor, source, True)
    )
    group.send_on_calc_stream = lambda self, tensor, to, *_: done(self.send(tensor, to, True))
    group.recv_on_calc_stream = lambda self, tensor, source, *_: done(self.recv(tensor, source, True))


class _GatherVocabulary(paddle.autograd.PyLayer):  # type: ignore[misc]
    """All ranks' parts of the logits; each keeps the gradient of its own part."""

    @staticmethod
    def forward(ctx: Any, logits: Any, group: Any) -> Any:
        ctx.group, ctx.width = group, logits.shape[-1]
        parts: list[Any] = []
        dist.all_gather(parts, logits, group=group)
        return paddle.concat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        begin = ctx.group.rank * ctx.width
        return gradient[..., begin : begin + ctx.width].clone()


def _tensor_parallel_operations() -> None:
    """Two operations of tensor parallel layers have no CPU kernel."""

    def cross_entropy(
        logits: Any, label: Any, group: Any = None, return_softmax: bool = False, ignore_index: int = -100
    ) -> Any:
        group = group or fleet.get_hybrid_communicate_group().get_model_parallel_group()
        gathered = _GatherVocabulary.apply(logits, group)
        return F.cross_entropy(gathered, label, reduction="none", ignore_index=ignore_index)

    _C_ops.c_identity = lambda tensor, *_args, **_kwargs: tensor.clone()
    mp_ops._c_softmax_with_cross_entropy = cross_entropy


def _broadcast_input_data(hcg: Any, *inputs: Any, **named: Any) -> Any:
    group, source = hcg.get_model_parallel_group(), hcg.get_model_parallel_group_src_rank()
    for value in (*inputs, *named.values()):
        if paddle.is_tensor(value):
            dist.broadcast(value, src=source, group=group)
    return inputs, named


def _new_group(original: Any) -> Any:
    """Gloo's groups race when several are made at once: ranks take turns, and all of them are one group."""

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        several = dist.is_initialized() and dist.get_world_size() > 1
        if (
            several
            and ranks is not None
            and len(ranks) > 2
            and sorted(ranks) == list(range(dist.get_world_size()))
        ):
            return collective._get_default_group()
        if several:
            dist.barrier()
        group = original(ranks, *args, **kwargs)
        if several:
            dist.barrier()
        return group

    return new_group
