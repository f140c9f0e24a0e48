"""Operations become fused ops: linear with epilogue, norm, activation."""
