"""How quantization commutes with other ops, one class per family of ops.

``LiftQuantize`` and ``SinkDequantize`` are independent of the op. They ask :class:`.base.Commutes`
which values are quantized or dequantized on the other side, with which parameters, what the op
becomes on quantized values, and what both orders cost; they check users, strides and graph outputs.

To support another op, write a class with ``of``, and ``lift`` or ``sink`` or both, and add it to
``COMMUTING`` in ``registry.py``.
"""
