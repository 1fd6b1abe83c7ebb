"""Predicts a recorded step on other links and with more ranks. Pure: no torch, no process group."""
