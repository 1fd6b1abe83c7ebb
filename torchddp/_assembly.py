"""What models get from higher rooms: observers of their steps, and communication hooks by name.

``import torchddp`` imports this; the modules that it names are imported when a model needs them.
"""

from __future__ import annotations

from importlib import import_module

from torchddp.ddp import hooks
from torchddp.ddp.observers import register

# In the order in which they are notified of a step.
register("stragglers", "torchddp.diagnose.stragglers:Stragglers", lambda o: o.checks.stragglers, is_optional=True)
register("find_nonfinite", "torchddp.diagnose.nonfinite:NonFiniteFinder", lambda o: bool(o.checks.nonfinite))
register("check_parameters", "torchddp.diagnose.parameters:ParameterCheck", lambda o: bool(o.checks.parameters_every))
register("hang_reports", "torchddp.diagnose.monitor:HangReports", lambda o: o.checks.reports_stalls, is_optional=True)
register("bucket_planning", "torchddp.plan.auto_plan:BucketPlanning", lambda o: o.plans_buckets)
register(
    "changed_gradients",
    "torchddp.diagnose.changed_gradients:ChangedGradients",
    lambda o: o.checks.traps,
    is_optional=True,
)
register("unaveraged_gradients", "torchddp.diagnose.changed_gradients:UnaveragedGradients", lambda o: o.checks.traps)
hooks.resolve = lambda hook: import_module("torchddp.comm_hooks").resolve(hook)
