"""The exit codes of every command, in one table; docs/reference/cli.md shows it and a test compares the two."""

import signal

OK = 0
FAILED = 1
USAGE = 2
LOST = 3
CONTROL_FAILED = 4
UNDECIDED = 5
INTERNAL = 70
INTERRUPTED = 128 + signal.SIGINT

MEANINGS = {
    OK: "done, and nothing was lost",
    FAILED: "a fault, or fewer results than asked for; `losstest`: a promise or an expectation was not met",
    USAGE: "wrong arguments or a wrong configuration; nothing was done",
    LOST: "it worked, and events were lost; standard error names the ranges",
    CONTROL_FAILED: "`losstest`: a control failed, so there is no report",
    UNDECIDED: "`losstest`: a run did not come to rest, so nothing can be said about it",
    INTERNAL: "a defect of brokerless; `BROKERLESS_TRACEBACK=1` shows the traceback to report",
    INTERRUPTED: "cut short by Ctrl-C (143: by SIGTERM, 141: the reader of the output left)",
}
