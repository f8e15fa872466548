"""The single controller: resource pools, worker groups and batches of references (HybridFlow section 4).

Calls. The controller sends calls without waiting; `log.drain()` waits for all of them.

    controller                         rank of pool A            rank of pool B

    A.generate(batch)    record
    B.score(batch)       send -------> generate.
                         send ---------------------------------> wait for the blocks of A
                                       put blocks into Ray's store --> score.
    log.drain()          wait for the outcomes of all messages; raise the first failure.

A rank runs its calls in order, and waits only for fields of other processes. Ray unblocks the rank when the producer's
message has ended. A rank that dies or hangs unblocks nobody: `drain` raises CommunicationError after the deadline, and
`diagnosis` names the rank.

Groups of rows (`rollout.stream`). The scorer waits for one group, not for the whole call.

    rank of A, thread 1   generate: put group 0 to n into the Outlet of the call.
    rank of A, thread 2   row_group(call, n): wait for the Outlet, which `put` or `fail` unblocks.
    rank of B             score each group as it comes; the call on all rows only orders the results.

Working ahead (`rollout.maxStaleness`). Calls for the rollout pool are set aside (`CallLog.aside`): `drain` of a
training step does not wait for them. `settle` waits for the responses of a step before the step trains on them.

    pool that trains   step 1          step 2          step 3
    rollout pool       2, then 3       4               5.
"""
