"""What holds for every test: no verdict depends on how busy the machine is."""

from hypothesis import HealthCheck, settings

settings.register_profile("rltop", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rltop")
