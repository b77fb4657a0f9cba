"""Names of a package that are imported when they are first used."""

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazy(
    package: str, public: Sequence[str], homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The `__getattr__` and the `__dir__` of a package; `homes` has the modules of its names, in it
    or by their whole names. A name may be that of a module itself."""

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name] if homes[name].startswith("dpframe.") else f"{package}.{homes[name]}"
        module = importlib.import_module(home)
        return module if home.endswith(f".{name}") else getattr(module, name)

    return get, lambda: sorted(public)
