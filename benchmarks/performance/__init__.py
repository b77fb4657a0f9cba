"""How fast dpframe is beside scripts written by hand and beside other frameworks."""
