"""The parts of `rljob_operator.decide`: what is seen, what it means, what is said. All of it is pure."""
