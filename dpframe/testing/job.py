"""Checks of the job: who is who, who does what, and what is left when it is over."""

from collections import Counter

from dpframe import checkpoint
from dpframe.errors import UserError
from dpframe.testing.apart import weights_apart
from dpframe.testing.evidence import Evidence
from dpframe.testing.found import TOLERANCE, Found, counted, shown
from dpframe.testing.measure import CHECKPOINT
from dpframe.testing.tasks import Small


def launch(evidence: Evidence) -> Found:
    facts = evidence.of_each("facts")
    ranks = sorted(fact["rank"] for fact in facts)
    mains = [fact["rank"] for fact in facts if fact["is_main"]]
    cause = ""
    if ranks != list(range(len(facts))):
        cause = f"the processes have the ranks {shown(ranks)}: setup must give each its own"
    elif any(fact["world_size"] != len(facts) for fact in facts):
        sizes = sorted({fact["world_size"] for fact in facts})
        cause = f"{len(facts)} processes ran, and world_size is {shown(sizes)}"
    elif mains != [0]:
        cause = f"is_main is true in the ranks {shown(mains)}; it has to be in rank 0 alone"
    elif any(fact["replicas"] != len(fact["devices"]) for fact in facts):
        named = len(facts[0]["devices"])
        cause = f"replicas is {facts[0]['replicas']}, and devices names {named}"
    elif not evidence.has_failed and evidence.returned != facts[0]["pid"]:
        cause = "launch did not return what `run` returned in the main process"
    return Found("ranks, the main one, what launch returns", counted(len(facts), "process"), cause)


def collectives(evidence: Evidence) -> Found:
    count = evidence.processes
    given = evidence.of_each("collectives")
    total = [count * (count + 1) / 2]
    wanted = {"reduce": total, "tally": total, "share": 0}
    wrongs = []
    for rank, values in enumerate(given):
        for name, value in wanted.items():
            if values[name] != value:
                wrongs.append(f"{name} gave {values[name]} in rank {rank}, not {value}")
        gathered = list(range(count)) if rank == 0 else []
        if values["gather"] != gathered:
            wrongs.append(f"gather gave {values['gather']} in rank {rank}, not {gathered}")
    meaning = (
        "reduce is the sum, so is tally, gather the main process's list by rank, share its value"
    )
    cause = f"{wrongs[0]}: {meaning}" if wrongs else ""
    return Found("reduce, gather and share", f"{len(wrongs)} wrong", cause)


def shutdown(evidence: Evidence) -> Found:
    here = [f"{one}, in the process that launched the job" for one in evidence.left]
    for note in evidence.notes:
        rank = note["facts"]["rank"]
        here += [f"{one}, in rank {rank} after close()" for one in note["leftovers"]]
    cause = f"left behind: {'; '.join(here)}" if here else ""
    return Found("processes, threads, ports, process group", f"{len(here)} left", cause)


def gradient_sync(evidence: Evidence) -> Found:
    """Of an update's micro-batches only the last one's backward may share gradients."""
    given: list[list[list[float]]] = evidence.of_each("gradients")
    compared = "3 micro-batches of one update"
    if evidence.processes == 1:
        return Found(compared, "1 process", is_void=True)
    batches = len(given[0])
    shared = [i for i in range(batches) if all(_is_close(one[i], given[0][i]) for one in given)]
    cause = ""
    if not given[0][-1]:
        cause = "no gradient was left on the task's parameters"
    elif batches - 1 not in shared:
        cause = "after the last micro-batch the processes still have gradients of their own"
    elif len(shared) > 1:
        cause = (
            f"the gradients were shared {len(shared)} times in one update: grad_sync(False) has "
            "no effect, so that each micro-batch waits for the network, which is slow"
        )
    return Found(compared, f"shared {counted(len(shared), 'time')}", cause)


def logged_once(evidence: Evidence) -> Found:
    path = evidence.plan.directory / "logged.txt"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    times = Counter((step, name) for _, step, name in lines)
    writers = {int(pid) for pid, _, _ in lines}
    main = evidence.main["facts"]["pid"]
    compared = "what every process's logger got"
    if not lines:
        return Found(compared, "0 times", "nothing was logged: `logger` must keep the main one's")
    (step, name), most = times.most_common(1)[0]
    cause = ""
    if most > 1:
        cause = (
            f"{name} of step {step} was logged {most} times, by "
            f"{counted(len(writers), 'process')}: `logger` must give the loggers back in the main "
            "process alone"
        )
    elif writers != {main}:
        cause = "another process than the main one logged: the run directory is the main one's"
    return Found(compared, counted(most, "time"), cause)


def checkpoint_round_trip(evidence: Evidence) -> Found:
    """Written under the strategy, read here; and read by the strategy, which goes on from it."""
    kept = evidence.main["resumed"]
    compared = "saved, read on the CPU, and trained on"
    cause = kept["error"] and f"its state can't be saved: {kept['error']}"
    cause = cause or _state_cause(evidence)
    if cause or kept["resumed"] is None:
        return Found(compared, "unlike", cause)
    apart = weights_apart(kept["resumed"], evidence.main["kit"].weights)
    if not apart <= TOLERANCE:
        cause = (
            f"an epoch, a checkpoint and a second epoch end {apart:.1e} apart from two epochs: "
            "state_dict or load_state_dict loses something"
        )
    return Found(compared, f"{apart:.1e}", cause)


def _state_cause(evidence: Evidence) -> str:
    """What is wrong with the weights in the file, if anything is."""
    try:
        state = checkpoint.load(evidence.plan.directory / CHECKPOINT)
        names, wanted = list(state["task"]), list(Small().state_dict())
        if names != wanted:
            return (
                f"it has {names[0]} in place of {wanted[0]}: wrap must leave the task as it is, "
                "and wrap what holds it"
            )
        checkpoint.load_task(Small().double(), state)
    except UserError as error:
        return str(error)
    trained = dict(evidence.main["resumed"]["weights"])
    unlike = [name for name in wanted if not state["task"][name].equal(trained[name])]
    return f"{unlike[0]} in it is not the one that was trained" if unlike else ""


def _is_close(one: list[float], other: list[float]) -> bool:
    near = (abs(a - b) <= 1e-9 * max(1.0, abs(b)) for a, b in zip(one, other, strict=False))
    return len(one) == len(other) and all(near)
