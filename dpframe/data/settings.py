"""What `data.*` may be of every DataModule; a recipe's class has keys of its own beside them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self

from dpframe.values import check_types, refuse_below

BY_RANK = "by_rank"


@dataclass
class DataSettings:
    """The attributes of a DataModule, with the same defaults."""

    batch_size: int | Mapping[str, int] = 32  # or of each training set by its name
    workers: int | Literal["auto"] = 0
    shuffle: bool = True
    divide_streams: bool = False
    divided: Literal["by_rank"] | None = None
    drop_last: bool = False
    eval_batch_size: int | None = None
    input: str | None = None
    persistent_workers: bool | Literal["auto"] = "auto"
    pin_memory: bool = True

    def __post_init__(self) -> None:
        check_types(self, "data")
        size = self.batch_size
        for name, rows in size.items() if isinstance(size, Mapping) else [("", size)]:
            refuse_below(f"data.batch_size{'.' * bool(name)}{name}", rows)
        refuse_below("data.eval_batch_size", self.eval_batch_size)
        if self.workers != "auto":
            refuse_below("data.workers", self.workers, 0)

    @classmethod
    def of(cls, data: Any, *names: str) -> Self:
        """Those of a DataModule, or some of them, when they are read."""
        names = names or tuple(each.name for each in fields(cls))
        return cls(**{name: getattr(data, name) for name in names})
