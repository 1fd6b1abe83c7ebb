"""Importable home of the wheel's test class, so that spawned children can unpickle it."""

import conf_boot

WheelDistTest = conf_boot.load_wheel()
