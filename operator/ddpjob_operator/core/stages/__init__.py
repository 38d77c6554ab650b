"""One module for each stage of a job, named after its phase where it has one: what to do, and which transition follows.

`plan` calls, in any phase, `finished` (success, failure, the time after), `suspend` and `deadlines`; then, by phase,
`pending`, `starting` (Restarting too) or `running`. `restart` begins most attempts but the first, `all_or_nothing` the
one that follows an incomplete gang. `initialize` and `all_or_nothing` are parts of `starting`, and `invalid_spec` is
for jobs that no plan can be made for.
"""
