/* Permutations of many domains, a key for each; see `permute` in _util/randomness.py. Included by _core.c, under the GIL.
 *
 * Permutation number p is of 0 to ends[p] - 1. A small one is stored, from images[starts[p]] on; of a large one,
 * constants[p] holds what each round adds, and by what it multiplies.
 */
#define ROUNDS 6
#define SMALL 1024

typedef struct {
    uint64_t (*constants)[2 * ROUNDS];
    int16_t *images;
    const int64_t *ends, *starts;
    Py_ssize_t count, stored; /* permutations, and their images */
    Py_buffer views[9];
} Permutations;

/* Get the arrays of a call, all of int64 but `images`, the first `writable` to be written; -1 with an exception. */
static int get_arrays(Permutations *p, PyObject *const *args, int count, int writable) {
    int held = 0;
    for (; held < count; held++)
        if (PyObject_GetBuffer(args[held], &p->views[held], held < writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) goto failed;
    p->constants = p->views[0].buf, p->images = p->views[1].buf, p->ends = p->views[2].buf, p->starts = p->views[3].buf;
    p->count = p->views[2].len / 8, p->stored = p->views[1].len / 2;
    if (p->views[0].len == p->count * (Py_ssize_t)sizeof *p->constants && p->views[3].len == p->count * 8) return 0;
    PyErr_SetString(PyExc_ValueError, "the arrays of permutations do not fit each other");
failed:
    while (held) PyBuffer_Release(&p->views[--held]);
    return -1;
}

/* Whether there is such a permutation, and its images are inside. */
static int is_valid(const Permutations *p, int64_t number) {
    if (number < 0 || number >= p->count || p->ends[number] < 1) return 0;
    return p->ends[number] > SMALL || (p->starts[number] >= 0 && p->starts[number] <= p->stored - p->ends[number]);
}

static PyObject *finish(Permutations *p, int count, int64_t wrong_row, int64_t found) {
    while (count) PyBuffer_Release(&p->views[--count]);
    if (wrong_row < 0) return PyLong_FromLongLong(found);
    return PyErr_Format(PyExc_ValueError, "row %lld is of no permutation", (long long)wrong_row);
}

static int bits_of(int64_t end) { return end > 2 ? 64 - __builtin_clzll(end - 1) : 1; }

static uint64_t hash64(uint64_t key, uint64_t value) {
    value = value * 0x9E3779B97F4A7C15 + key;
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9;
    value = (value ^ value >> 27) * 0x94D049BB133111EB;
    return value ^ value >> 31;
}

/* Sort the numbers below `end` by their hashes, all different: by the first bits, and then among neighbours. */
static void sort_hashed(int16_t *images, int end, uint64_t first, uint64_t second) {
    uint64_t hashes[SMALL], sorted[SMALL];
    int16_t starts[2 * SMALL + 1];
    int shift = 64 - bits_of(end);
    memset(starts, 0, ((1 << (64 - shift)) + 1) * sizeof *starts);
    for (int i = 0; i < end; i++) starts[((hashes[i] = hash64(second, hash64(first, i))) >> shift) + 1]++;
    for (int i = 1; i <= 1 << (64 - shift); i++) starts[i] += starts[i - 1];
    for (int i = 0; i < end; i++) {
        int at = starts[hashes[i] >> shift]++;
        sorted[at] = hashes[i], images[at] = i;
    }
    for (int i = 1; i < end; i++) {
        uint64_t hash = sorted[i];
        int16_t image = images[i];
        int at = i;
        for (; at && sorted[at - 1] > hash; at--) sorted[at] = sorted[at - 1], images[at] = images[at - 1];
        sorted[at] = hash, images[at] = image;
    }
}

/* put_keys(constants, images, ends, starts, numbers, keys): those of some numbers, two words of a key for each */
static PyObject *put_keys(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    Permutations p;
    if (wrong("put_keys", 6, count) || get_arrays(&p, args, 6, 2)) return NULL;
    const int64_t *numbers = p.views[4].buf;
    const uint64_t *keys = p.views[5].buf;
    int64_t rows = p.views[4].len / 8, row = 0;
    if (p.views[5].len != 16 * rows) rows = -1;
    for (; row < rows && is_valid(&p, numbers[row]); row++, keys += 2) {
        int64_t number = numbers[row], end = p.ends[number];
        if (end <= SMALL) sort_hashed(p.images + p.starts[number], end, keys[0], keys[1]);
        for (int i = 0; end > SMALL && i < 2 * ROUNDS; i++)
            p.constants[number][i] = (hash64(keys[1], hash64(keys[0], i)) & ((1ULL << bits_of(end)) - 1)) | (i & 1);
    }
    return finish(&p, 6, row == rows ? -1 : row, 0);
}

/* permute(constants, images, ends, starts, passes, firsts, numbers, draws, out): the image of each draw from an order
 * that repeats, in its pass; -1 if another pass of it is set. Returns how many are -1. */
static PyObject *permute(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    Permutations p;
    if (wrong("permute", 9, count) || get_arrays(&p, args, 9, 0)) return NULL;
    const int64_t *passes = p.views[4].buf, *firsts = p.views[5].buf, *numbers = p.views[6].buf, *draws = p.views[7].buf;
    int64_t *out = p.views[8].buf, rows = p.views[8].len / 8, row = 0, late = 0;
    int fit = !p.views[8].readonly && p.views[6].len == rows * 8 && p.views[7].len == rows * 8;
    if (!fit || p.views[4].len != p.count * 8 || p.views[5].len != p.count * 8) rows = -1;
    for (; row < rows && is_valid(&p, numbers[row]); row++) {
        int64_t number = numbers[row], end = p.ends[number], pass = (double)draws[row] / (double)end;
        uint64_t value = draws[row] - pass * end;
        if (value >= (uint64_t)end) break;
        if (passes[number] != pass + firsts[number]) {
            late++, out[row] = -1;
        } else if (end <= SMALL) {
            out[row] = p.images[p.starts[number] + value];
        } else {
            int bits = bits_of(end), half = (bits + 1) / 2;
            uint64_t mask = (1ULL << bits) - 1, *words = p.constants[number];
            do {
                for (int i = 0; i < ROUNDS; i++) {
                    value = (value + words[2 * i]) * words[2 * i + 1] & mask;
                    value ^= value >> (half + i % 2);
                }
            } while (value >= (uint64_t)end);
            out[row] = value;
        }
    }
    return finish(&p, 9, row == rows ? -1 : row, late);
}
