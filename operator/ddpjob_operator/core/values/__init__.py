"""The values that decisions are made from and end in: job, observed children, actions, names, conditions, the trainer's
report. No decisions.
"""
