"""The one kind of exception that is meant for the user and not for a debugger."""


class UserError(Exception):
    """Bad input: one sentence that says what is wrong, where, and what to do about it.

    The commands print the sentence without a traceback and leave with exit code 2. Anything else that is raised is a
    bug of nca_jax and keeps its traceback.
    """
