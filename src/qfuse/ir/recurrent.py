"""Recurrent layers of torch: one op for a whole sequence."""

from __future__ import annotations

from torch._ops import OpOverload

from qfuse.ir.aten import aten

RECURRENT: tuple[OpOverload, ...] = (
    *(aten.lstm.input, aten.lstm.data, aten.gru.input, aten.gru.data),
    *(aten.rnn_tanh.input, aten.rnn_tanh.data, aten.rnn_relu.input, aten.rnn_relu.data),
    aten.mkldnn_rnn_layer.default,
)
"""They multiply the input and the state by weights at every step of a sequence."""

RECURRENT_NAMES = frozenset(str(op).removesuffix(".default") for op in RECURRENT)
"""Their names in the places of events."""
