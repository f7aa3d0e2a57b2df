"""Operations with more than one implementation; knows nothing of models or engine."""
