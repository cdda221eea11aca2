"""What trainers use: each adapter in a module of its own, none of them imported by the engine."""
