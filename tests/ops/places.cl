// places.cl: where the pieces of a tile's lines lie, by kernels/matrix_tile.clh, which goes before it.

// A work-item a line; PIECES of a line.
__kernel void places(__global uint *out) {
    const uint line = get_global_id(0);
    for (uint piece = 0; piece < PIECES; piece++) out[line * PIECES + piece] = place_of(PIECES, line, piece);
}
