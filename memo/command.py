"""What the commands of memo have in common."""

import signal


def end_with_reader():
    """From here on the process ends quietly, by SIGPIPE, where nobody reads its output any more (`| head`), as other
    commands do; Python ignores that signal. Not for a training run: its sockets may break, and it goes on."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
