"""`python -m ddp_trainer.initialize`: puts data sets and models onto the volume before training starts. No torch."""
