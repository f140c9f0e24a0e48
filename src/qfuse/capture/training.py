"""Refuse models in training mode, which draw random numbers or update statistics."""

from __future__ import annotations

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from qfuse.ir.errors import TrainingError
from qfuse.ir.events import EventLog, Noted
from qfuse.ir.graph.schema import arguments, overload_of
from qfuse.ir.graph.stage_graph import place_of

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def check_modules(model: nn.Module) -> None:
    """Refuse a model with modules in training mode that behave differently from eval mode.

    Raises:
        TrainingError: There is such a module.
    """
    for name, module in model.named_modules():
        if module.training and _acts_differently(module):
            raise TrainingError(
                f"the model is in training mode: {name or 'it'} ({type(module).__name__}) acts "
                "differently there",
                fix="call model.eval() first",
            )


def _acts_differently(module: nn.Module) -> bool:
    match module:
        # Its slopes are random in training.
        case nn.RReLU():
            return True
        case nn.MultiheadAttention() | nn.RNNBase():
            return float(module.dropout) > 0
        case _ if isinstance(module, _DROPOUTS):
            return module.p > 0
        case _:
            # Without running statistics, both modes use those of the batch.
            return isinstance(module, _NORMS) and module.track_running_stats


def eval_mode_fix(model: nn.Module) -> str:
    """Return how to bring a model into eval mode; the ops of an exported graph stay as they are."""
    if isinstance(model, GraphModule):
        return "call torchao.quantization.pt2e.move_exported_model_to_eval(model) before capture"
    return "call model.eval() before capture"


def check_random(module: GraphModule, log: EventLog, *, eval_mode_fix: str | None) -> None:
    """Check the random ops of the graph: an error if the model was in training mode.

    Args:
        module: The captured graph, with the origins of its nodes.
        log: Receives a warning for each node that is random in eval mode.
        eval_mode_fix: What to do if an op was captured in training mode; ``None`` if all modules
            were in eval mode.

    Raises:
        TrainingError: A functional dropout or batch norm was captured in training mode.
    """
    for node in module.graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        trains = _trains(node)
        if trains and eval_mode_fix is not None:
            place = place_of(node)
            raise TrainingError(
                f"{place.op} was captured in training mode",
                where=place.source or str(place),
                fix=eval_mode_fix,
            )
        if (trains and "momentum" not in arguments(node)) or is_random(node):
            log.add(
                Noted(
                    "capture",
                    f"{node.target} draws random numbers: results differ from run to run, and "
                    "checks of values cannot hold",
                    place_of(node),
                    warn=True,
                )
            )


def is_random(node: Node) -> bool:
    """Return whether ``node`` draws random numbers.

    Attention without dropout does not, nor do dropouts and recurrent layers in eval mode.
    """
    op = overload_of(node)
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    given = arguments(node)
    switches = [given[name] for name in ("train", "training") if name in given]
    rates = [given[name] for name in ("p", "dropout", "dropout_p") if name in given]
    return all(switch is not False for switch in switches) and 0 not in rates


def _trains(node: Node) -> bool:
    """Return whether ``node`` acts otherwise in eval mode: ``train`` or ``training`` is true.

    Dropout with p=0 does not, and a batch norm without running statistics neither.
    """
    given = arguments(node)
    if not any(given.get(name) is True for name in ("train", "training")):
        return False
    rates = [given[name] for name in ("p", "dropout", "dropout_p") if name in given]
    if rates:
        return any(rate not in (0, None) for rate in rates)
    # The overloads of a batch norm without statistics lack the argument.
    return "momentum" not in given or given.get("running_mean") is not None
