"""How the processes of a job start, hear signals and end.

A process that trains is alone; or one of several that torchrun, srun or mpirun has started; or a
rank that `local` has started on this machine: `environment` reads which. Ray starts its own, see
plugins/ray. The way of a rank of `local` is `Strategy.launch` -> `local.launch` ->
`_Job.start` -> `rank.rank_main` -> `rank.do_work` -> a message to the job -> `_Job.result`.

- `local` starts ranks and watches them until the last one has ended. `rank` is what such a rank
  does, from its main function to its last words. `rank_errors` finds the rank that failed first.
- `peers` lets the ranks of a launcher end together.
- `signals` remembers the signal that ends a run at its next step; in a child, it sees to it that
  no process outlives its parent. `watchdog` ends a run that makes no progress.
- `interpreter` calls a function in a new interpreter, e.g. for a notebook, which can't be forked.
"""
