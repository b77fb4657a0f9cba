"""The recipes: one Task and one DataModule a file, built by conf/recipe/<name>.yaml."""
