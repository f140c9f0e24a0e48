"""How quantization changes places with other ops, one class per family of ops.

``LiftQuantize`` and ``SinkDequantize`` know no op. They ask :class:`.base.Commutes` what is
quantized or dequantized on the other side, with which parameters, what the op becomes on quantized
values, and what both orders cost; they check users, strides and what leaves the graph.

To teach them an op, write a class with ``of``, and ``lift`` or ``sink`` or both, and add it to
``COMMUTING`` in ``registry.py``.
"""
