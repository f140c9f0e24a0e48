"""Time, memory and work of each op of a lowered graph, as data, as a table and as traces."""

from qfuse.profile.profile import OpTime, Profile
from qfuse.profile.run import profile_plan

__all__ = ["OpTime", "Profile", "profile_plan"]
