"""Libraries that train and save by themselves: each module is for the library of its name, and imports it.

They use `ddp_trainer.attach()` alone, as a script of your own could.
"""
