"""What ends a command for a reason that is meant for the user and not for a debugger, and its exit codes."""

# EX_TEMPFAIL of sysexits.h: nothing is wrong with the input, and the same command will go on from here. Launchers and
# batch systems can tell it from a crash (1, or a signal's 128 + n) and from input that cannot work (2).
RETRY_EXIT_CODE = 75


class UserError(Exception):
    """Bad input: one sentence that says what is wrong, where, and what to do about it.

    The commands print the sentence without a traceback and leave with exit code 2. Anything else that is raised is a
    bug of nca_jax and keeps its traceback.
    """


class Preempted(Exception):
    """The run was asked to stop and has saved; its one line says after which step and how to go on."""
