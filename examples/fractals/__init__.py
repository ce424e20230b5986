"""Learn to tell fractals apart: the task of LLNL's scale-free fractal benchmark."""
