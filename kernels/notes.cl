// notes.cl: what a device writes down of each step, for the host to read all at once, much later.
//
//   notes   | ... | row | row | ...     `note`   one element: a word a row
//                    ^                  `total`  what squares.cl has summed, of all tiles: three words a row
//
//   X_T     storage type of the element that is noted

__kernel ONE_WORK_ITEM void note(__global const STORAGE(X_T) *restrict x, __global float *restrict notes,
                                 const ulong row) {
    notes[row] = LOAD(X_T, x, 0);
}

__kernel ONE_WORK_ITEM void total(__global const float *restrict sums, const ulong tiles, __global float *restrict notes,
                                  const ulong row) {
    float low = 0.0f, mid = 0.0f, high = 0.0f;
    for (ulong i = 0; i < tiles; i++) {
        low += sums[3 * i];
        mid += sums[3 * i + 1];
        high += sums[3 * i + 2];
    }
    notes[3 * row] = low;
    notes[3 * row + 1] = mid;
    notes[3 * row + 2] = high;
}
