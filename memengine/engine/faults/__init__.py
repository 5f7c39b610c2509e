"""What lets a run survive faults: signals, processes that die or hang, steps that go wrong."""
