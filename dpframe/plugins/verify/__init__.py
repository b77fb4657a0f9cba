"""The conformance kit, of `dpframe.testing` and `mode=verify`.

`verification` launches `measure` by the strategy. Each process trains the courses
of `course` and notes what it sees in a file. `evidence` is these notes, beside what `reference`
gives in plain torch; `checks` judge it by `distance`.
"""
