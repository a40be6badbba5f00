"""RLJob → components: pure, the same for every driver."""
