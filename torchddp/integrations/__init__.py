"""torchddp under the programs that train with DistributedDataParallel. See docs/integrations.md.

Nothing is imported here: each module needs its client (`extras.require`), but for `install`, which needs none.
"""
