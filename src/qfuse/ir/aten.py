"""``torch.ops.aten`` under the name that all rules use."""

import torch

aten = torch.ops.aten
