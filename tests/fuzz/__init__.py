"""Random training programs, run with torch's class and with ours in the same ranks, and compared after every line.

`python -m tests.fuzz --help` says how to run them.

program: a program as plain data. draw: a program from a seed. model: the module it describes. side: one class that
runs it. run: both classes in turn, many programs on forked ranks. compare: the first difference. wanted: intended
differences.
"""
