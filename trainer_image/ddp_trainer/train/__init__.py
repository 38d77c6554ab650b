"""`python -m ddp_trainer.train`: parse the settings (`config`), build a run of them (`build`), run it (`loop`).

What a step does with a batch is in `strategies`; which samples it gets in `data`. Tasks are in `ddp_trainer.tasks`.
"""
