"""What comes with dpframe and is no part of its core: found by entry points, as any package's.

A new mode is a module here, its entry point in pyproject.toml (and an installation, which writes
it), its name in `UNINSTALLED` of config/modes.py, its tests in tests/plugins, and a line in
README.md, docs/features.md and changes/. A new option is a YAML file in the plugin's `conf`,
with the folder's entry point, and its name in `OPTIONS` of config/plugins.py. A key of `trainer.*`
that a plugin carries out is in `OF_PLUGINS` of trainer/settings.py, and an entry point of its name
is the module with `settle` and `put_around`.
"""
