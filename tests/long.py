LONG = {}
def is_long(file, test): return False
