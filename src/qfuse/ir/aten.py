"""``torch.ops.aten``, under the name that every rule calls it by."""

import torch

aten = torch.ops.aten
