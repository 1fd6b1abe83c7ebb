"""From a recorded step to the same step on other links and with more ranks. Pure: no torch, no process group."""
