"""What tests rely on of the process that runs them, and what those that they start inherit, whoever started it."""

import os
import resource
import signal

# What a shell without job control, nohup or a supervisor may ignore or block. Not SIGHUP: under nohup the run goes on.
SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGUSR1)
OPEN_FILES = 4096


def restore_usual() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    # Ranks that die on purpose leave no core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
