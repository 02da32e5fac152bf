"""Operations on a deployment: deploy, probe, verify, scale, take down."""
