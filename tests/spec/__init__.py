"""What `.grad` is after each call, as plain Python, and an array of programs that covers the options and actions.

`reference.py` is the specification, `table.py` lists options, actions and refusals, `covering.py` makes the array,
`program.py` turns a row into a program, and `run.py` compares the program with the reference.
"""
