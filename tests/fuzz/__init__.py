"""Random training programs, run with torch's class and with ours in the same ranks, and compared after every operation.

`python -m tests.fuzz --help` says how to run them.

program: what a program is (plain data). draw: a program from a seed. model: the module it describes. side: one class
working on it. run: both classes in turn. compare: the first difference. wanted: differences that are there by intent.
batches: many programs on forked ranks.
"""
