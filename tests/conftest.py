"""What holds for every tier: a property is tested for what it says, never for how fast this machine says it."""

from hypothesis import HealthCheck, settings

settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("any-machine")
