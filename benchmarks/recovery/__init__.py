"""The ranks of the case `recovery`, one program for each way to go on after a rank has died."""
