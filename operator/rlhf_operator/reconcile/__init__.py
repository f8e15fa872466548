"""What is to be done about a job, from what one pass saw of it. Pure: no clock, no cluster, no memory but the status.

`decide` reads top down: a job that has ended (`ended`), an attempt that is under way (`watch`), the time between two
attempts (`between`). All of them write into one `Turn`. What cannot be taken back is decided on live reads only, and
the status always says what will be done before it is done, so that an operator may be killed at any moment.
"""

from rlhf_operator.reconcile.decision import decide

__all__ = ["decide"]
