"""The config: composed and checked before torch is imported, then built into parts."""
