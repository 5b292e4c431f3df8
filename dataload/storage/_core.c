/* The compiled core: copies records out of mapped files without the GIL.
 *
 * Each function equals its namesake in _core_numpy.py, if there is one. Numbers are copied and checked before the GIL
 * is released, so neither wrong ones nor another thread that changes them can make a copy leave its buffers. The
 * argument `file` is the descriptor of the file behind mapped data, or -1 for plain memory; or the descriptor, and
 * when the file was changed last, in nanoseconds. If the file has shrunk, was changed since, or its disk fails,
 * MapFault is raised with an offset: a page that disappears while it is copied would otherwise kill the process, and
 * the rest of the last page reads as 0.
 */
#define PY_SSIZE_T_CLEAN
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

#include "_highway.h"
#include "_lmdb.h"

/* ---- The SIGBUS guard ---- */

typedef struct {
    const char *start, *end;
} Span;

typedef struct {
    sigjmp_buf escape;
    const Span *const *spans; /* faults in these bytes are ours */
    Py_ssize_t count;
    volatile Py_ssize_t span; /* of the last fault, */
    volatile int64_t fault;   /* and its offset there */
} Guard;

static _Thread_local Guard *volatile active;      /* of a copy in progress */
static _Thread_local volatile sig_atomic_t chained; /* while the earlier handler runs */
static struct sigaction earlier;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    Guard *guard = active;
    const char *address = info->si_addr;
    for (Py_ssize_t span = 0; guard && info->si_code > 0 && span < guard->count; span++) {
        if (address >= guard->spans[span]->start && address < guard->spans[span]->end) {
            active = NULL;
            guard->span = span;
            guard->fault = address - guard->spans[span]->start;
            siglongjmp(guard->escape, 1);
        }
    }
    /* Not ours. An earlier handler may reinstall this one and raise the signal again: end that loop. */
    if (!chained && (earlier.sa_flags & SA_SIGINFO)) {
        chained = 1;
        earlier.sa_sigaction(number, info, context);
        chained = 0;
    } else if (!chained && earlier.sa_handler == SIG_IGN && info->si_code <= 0) {
        return;
    } else if (!chained && earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN) {
        chained = 1;
        earlier.sa_handler(number);
        chained = 0;
    } else {
        signal(number, SIG_DFL);
        raise(number);
    }
}

/* Make on_sigbus the handler, also if another library has replaced it. Called with the GIL (or the module's lock). */
static int install_handler(void) {
    struct sigaction found, ours;
    if (sigaction(SIGBUS, NULL, &found)) return -1;
    if ((found.sa_flags & SA_SIGINFO) && found.sa_sigaction == on_sigbus) return 0;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_sigbus;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK; /* siglongjmp leaves the signal mask alone */
    sigemptyset(&ours.sa_mask);
    earlier = found;
    return sigaction(SIGBUS, &ours, NULL);
}

/* Call run(job); return the offset of a fault that it met in one of the spans, whose number is in `span`, or -1. */
static int64_t run_guarded(
    void (*run)(const void *), const void *job, const Span *const *spans, Py_ssize_t count, Py_ssize_t *span
) {
    Guard guard = {.spans = spans, .count = count};
    if (sigsetjmp(guard.escape, 0)) {
        *span = guard.span;
        return guard.fault;
    }
    active = &guard;
    atomic_signal_fence(memory_order_seq_cst);
    run(job);
    atomic_signal_fence(memory_order_seq_cst);
    active = NULL;
    return -1;
}

/* ---- Arguments ---- */

typedef struct {
    PyObject *MapFault;
} State;

static int wrong(const char *name, Py_ssize_t expected, Py_ssize_t found) {
    if (expected == found) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, expected, found);
    return 1;
}

/* A copy of an int64 array, to be freed with PyMem_Free; NULL with an exception. */
static int64_t *copy_int64(PyObject *array, Py_ssize_t *count) {
    Py_buffer view;
    if (PyObject_GetBuffer(array, &view, PyBUF_SIMPLE)) return NULL;
    int64_t *copied = NULL;
    if (view.len % 8) {
        PyErr_Format(PyExc_ValueError, "expected int64 numbers, got %zd bytes", view.len);
    } else if (!(copied = PyMem_Malloc(view.len + 8))) {
        PyErr_NoMemory();
    } else {
        memcpy(copied, view.buf, view.len);
        *count = view.len / 8;
    }
    PyBuffer_Release(&view);
    return copied;
}

#define ANY_TIME INT64_MIN

typedef struct {
    int descriptor;
    long long changed; /* when it was changed last, or ANY_TIME */
} File;

/* Parse the argument `file`; -1 with an exception. */
static int take_file(PyObject *given, File *file) {
    file->changed = ANY_TIME;
    if (PyTuple_Check(given)) return PyArg_ParseTuple(given, "iL", &file->descriptor, &file->changed) ? 0 : -1;
    file->descriptor = PyLong_AsLong(given);
    return PyErr_Occurred() ? -1 : 0;
}

/* Return the size of a file that is not as it should be, or -1. */
static int64_t check_file(const File *file, int64_t size) {
    struct stat found;
    if (fstat(file->descriptor, &found)) return 0;
    int same = file->changed == ANY_TIME || found.st_mtim.tv_sec * 1000000000LL + found.st_mtim.tv_nsec == file->changed;
    return same && found.st_size >= size ? -1 : found.st_size;
}

static PyObject *outside(const char *what, int64_t row, int64_t size) {
    PyErr_Format(PyExc_ValueError, "row %lld: %s outside the %lld bytes", (long long)row, what, (long long)size);
    return NULL;
}

typedef struct {
    int64_t *offsets, *lengths;
    Py_ssize_t count;
    int64_t total; /* length of all */
} Ranges;

static void free_ranges(Ranges *ranges) {
    PyMem_Free(ranges->lengths);
    PyMem_Free(ranges->offsets);
}

/* Copy ranges, and check that all lie in `size` bytes; -1 with an exception. To be freed in either case. */
static int take_ranges(Ranges *ranges, PyObject *offsets, PyObject *lengths, int64_t size) {
    Py_ssize_t others = 0;
    memset(ranges, 0, sizeof *ranges);
    if (!(ranges->offsets = copy_int64(offsets, &ranges->count))) return -1;
    if (!(ranges->lengths = copy_int64(lengths, &others))) return -1;
    if (ranges->count != others) {
        PyErr_Format(PyExc_ValueError, "%zd offsets and %zd lengths", ranges->count, others);
        return -1;
    }
    for (Py_ssize_t row = 0; row < others; row++) {
        int64_t offset = ranges->offsets[row], length = ranges->lengths[row];
        if (length < 0 || length > size || offset < 0 || offset > size - length) {
            outside("a range", row, size);
            return -1;
        }
        if (length > PY_SSIZE_T_MAX - ranges->total) {
            PyErr_SetString(PyExc_OverflowError, "the ranges are longer than any memory");
            return -1;
        }
        ranges->total += length;
    }
    return 0;
}

/* Get a writable buffer and one to read; -1 with an exception, and neither. */
static int get_buffers(PyObject *writable, Py_buffer *out, PyObject *readable, Py_buffer *data) {
    if (PyObject_GetBuffer(writable, out, PyBUF_WRITABLE)) return -1;
    if (!PyObject_GetBuffer(readable, data, PyBUF_SIMPLE)) return 0;
    PyBuffer_Release(out);
    return -1;
}

/* ---- Copies ---- */

typedef struct {
    char *out;            /* where rows go one after another; or NULL */
    char **rows;          /* where each row goes, if out is NULL */
    uintptr_t data;       /* address of offset 0 */
    const int64_t *offsets;
    const int64_t *lengths; /* or NULL */
    int64_t length;         /* of every row, if lengths is NULL */
    Py_ssize_t count;
} Copy;

#define FROM(copy, row) ((const char *)((copy)->data + (uintptr_t)(copy)->offsets[row]))
#define LENGTH(copy, row) ((copy)->lengths ? (copy)->lengths[row] : (copy)->length)

#define AHEAD 24 /* rows; hides the latency of memory for rows of up to a few cache lines */
#define LINE 64

#define PAGE 4096 /* bytes, at whose end the hardware stops fetching what follows */

static void prefetch_page(const char *from) {
    for (int line = 0; line < 4 * LINE; line += LINE) __builtin_prefetch(from + line); /* it fetches the rest */
}

/* Prefetch the beginnings of a row's first two pages. */
static void prefetch_row(const char *from, int64_t length) {
    int64_t left = PAGE - (int64_t)((uintptr_t)from % PAGE);
    prefetch_page(from);
    if (left < length) prefetch_page(from + left);
}

static void copy_small(const Copy *c) {
    char *out = c->out;
    for (Py_ssize_t row = 0; row < c->count; row++, out += c->length) {
        if (row + AHEAD < c->count) {
            const char *next = FROM(c, row + AHEAD);
            for (int64_t line = 0; line < c->length; line += LINE) __builtin_prefetch(next + line);
            __builtin_prefetch(next + c->length - 1);
        }
        memcpy(out, FROM(c, row), c->length);
    }
}

#define LARGE (32 * LINE) /* bytes of a row on average */
#define TOGETHER 6 /* rows that are copied in turn: memory serves several places sooner than one after another */

/* Copy at most so many rows, a line of each in turn, and then what is left of each. */
static inline void copy_together(char *const *to, const char *const *from, const int64_t *lengths, int rows) {
    int64_t shared = rows ? lengths[0] : 0;
    for (int row = 1; row < rows; row++)
        if (lengths[row] < shared) shared = lengths[row];
    shared -= shared % LINE;
    for (int64_t at = 0; at < shared; at += LINE)
        for (int row = 0; row < rows; row++) memcpy(to[row] + at, from[row] + at, LINE);
    for (int row = 0; row < rows; row++) memcpy(to[row] + shared, from[row] + shared, lengths[row] - shared);
}

static void copy_large(const Copy *c) {
    char *out = c->out, *to[TOGETHER];
    const char *from[TOGETHER];
    int64_t lengths[TOGETHER];
    int held = 0;
    for (Py_ssize_t row = 0; row < c->count; row++) {
        if (row + AHEAD < c->count) __builtin_prefetch(FROM(c, row + AHEAD));
        from[held] = FROM(c, row);
        to[held] = c->rows ? c->rows[row] : out;
        lengths[held] = LENGTH(c, row);
        out += lengths[held];
        if (++held == TOGETHER) {
            copy_together(to, from, lengths, TOGETHER);
            held = 0;
        }
    }
    copy_together(to, from, lengths, held);
}

static void run_ranges(const void *job) {
    const Copy *c = job;
    char *out = c->out;
    int64_t total = 0;
    for (Py_ssize_t row = 0; row < c->count; row++) total += LENGTH(c, row);
    if (total >= c->count * LARGE) {
        copy_large(c);
        return;
    }
    for (Py_ssize_t row = 0; row < c->count; row++) {
        if (row + AHEAD < c->count) __builtin_prefetch(FROM(c, row + AHEAD));
        if (row + 1 < c->count && LENGTH(c, row + 1) >= 4 * LINE) prefetch_row(FROM(c, row + 1), LENGTH(c, row + 1));
        if (c->rows) out = c->rows[row];
        memcpy(out, FROM(c, row), LENGTH(c, row));
        out += LENGTH(c, row);
    }
}

/* The compiler turns memcpy of a constant length into a few instructions. */
#define COPY_CONSTANT(BYTES) \
    case BYTES: \
        for (Py_ssize_t row = 0; row < c->count; row++) { \
            if (row + AHEAD < c->count) { \
                __builtin_prefetch(FROM(c, row + AHEAD)); \
                if (BYTES > 1) __builtin_prefetch(FROM(c, row + AHEAD) + BYTES - 1); \
            } \
            memcpy(c->out + row * BYTES, FROM(c, row), BYTES); \
        } \
        return;

static void run_gather(const void *job) {
    const Copy *c = job;
    switch (c->length) {
        COPY_CONSTANT(1) COPY_CONSTANT(2) COPY_CONSTANT(4) COPY_CONSTANT(8)
        COPY_CONSTANT(16) COPY_CONSTANT(32) COPY_CONSTANT(64) COPY_CONSTANT(128)
    }
    if (c->length <= 8 * LINE) copy_small(c);
    else run_ranges(c);
}

#define KEEPS_GIL (1 << 16) /* bytes of plain memory that are copied faster than the GIL is handed over and back */

/* Call run(job), which reads `total` bytes of `data`; return None, or NULL with an exception. */
static PyObject *run_copy(
    PyObject *module, void (*run)(const void *), const void *job, const Py_buffer *data, int64_t total, const File *file
) {
    int64_t fault = -1;
    if (file->descriptor >= 0) {
        if (install_handler()) return PyErr_SetFromErrno(PyExc_OSError);
        Py_BEGIN_ALLOW_THREADS
        Span all = {data->buf, (const char *)data->buf + data->len};
        const Span *spans[] = {&all};
        Py_ssize_t span;
        fault = run_guarded(run, job, spans, 1, &span);
        if (fault < 0) fault = check_file(file, data->len);
        Py_END_ALLOW_THREADS
    } else if (total < KEEPS_GIL) {
        run(job);
    } else {
        Py_BEGIN_ALLOW_THREADS
        run(job);
        Py_END_ALLOW_THREADS
    }
    if (fault < 0) return Py_NewRef(Py_None);
    State *state = PyModule_GetState(module);
    return PyErr_Format(state->MapFault, "%lld", (long long)fault);
}

/* gather(out, data, start, stride, indices, length, file) */
static PyObject *gather(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (wrong("gather", 7, count)) return NULL;
    int64_t start = PyLong_AsLongLong(args[2]), stride = PyLong_AsLongLong(args[3]), length = PyLong_AsLongLong(args[5]);
    File file;
    if (PyErr_Occurred() || take_file(args[6], &file)) return NULL;
    Py_buffer out, data;
    if (get_buffers(args[0], &out, args[1], &data)) return NULL;
    PyObject *result = NULL;
    Py_ssize_t rows = 0;
    int64_t *offsets = copy_int64(args[4], &rows);
    if (!offsets) goto done;
    if (start < 0 || stride < 1 || length < 0) {
        PyErr_Format(PyExc_ValueError, "start %lld, stride %lld, length %lld: expected at least 0, 1 and 0",
                     (long long)start, (long long)stride, (long long)length);
        goto done;
    }
    if (length ? out.len / length != rows || out.len % length : out.len != 0) {
        PyErr_Format(PyExc_ValueError, "%zd rows of %lld bytes do not fill %zd bytes", rows, (long long)length, out.len);
        goto done;
    }
    /* Indices in [0, end) are inside. */
    int64_t room = start <= data.len && length <= data.len - start ? data.len - start - length : -1;
    uint64_t end = room < 0 ? 0 : (uint64_t)(room / stride) + 1;
    for (Py_ssize_t row = 0; row < rows; row++) {
        if ((uint64_t)offsets[row] >= end) {
            outside("a record", row, data.len);
            goto done;
        }
        offsets[row] = start + offsets[row] * stride;
    }
    Copy copy = {.out = out.buf, .data = (uintptr_t)data.buf, .offsets = offsets, .length = length, .count = rows};
    result = run_copy(module, run_gather, &copy, &data, out.len, &file);
done:
    PyMem_Free(offsets);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* gather_ranges(out, data, offsets, lengths, file) */
static PyObject *gather_ranges(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (wrong("gather_ranges", 5, count)) return NULL;
    File file;
    if (take_file(args[4], &file)) return NULL;
    Py_buffer out, data;
    if (get_buffers(args[0], &out, args[1], &data)) return NULL;
    PyObject *result = NULL;
    Ranges ranges;
    if (take_ranges(&ranges, args[2], args[3], data.len)) goto done;
    if (ranges.total != out.len) {
        PyErr_Format(PyExc_ValueError, "ranges of %lld bytes do not fill %zd bytes", (long long)ranges.total, out.len);
        goto done;
    }
    Copy copy = {.out = out.buf, .data = (uintptr_t)data.buf, .offsets = ranges.offsets,
                 .lengths = ranges.lengths, .count = ranges.count};
    result = run_copy(module, run_ranges, &copy, &data, ranges.total, &file);
done:
    free_ranges(&ranges);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* copies(data, offsets, lengths, file) -> list of bytes */
static PyObject *copies(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (wrong("copies", 4, count)) return NULL;
    File file;
    if (take_file(args[3], &file)) return NULL;
    Py_buffer data;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    PyObject *list = NULL;
    char **targets = NULL;
    Ranges ranges;
    if (take_ranges(&ranges, args[1], args[2], data.len)) goto done;
    if (!(targets = PyMem_Malloc(ranges.count * sizeof *targets + 1))) {
        PyErr_NoMemory();
        goto done;
    }
    list = PyList_New(ranges.count);
    for (Py_ssize_t row = 0; list && row < ranges.count; row++) {
        PyObject *bytes = PyBytes_FromStringAndSize(NULL, ranges.lengths[row]);
        if (!bytes) {
            Py_CLEAR(list);
        } else {
            targets[row] = PyBytes_AsString(bytes);
            PyList_SetItem(list, row, bytes);
        }
    }
    if (list) {
        Copy copy = {.rows = targets, .data = (uintptr_t)data.buf, .offsets = ranges.offsets,
                     .lengths = ranges.lengths, .count = ranges.count};
        PyObject *done = run_copy(module, run_ranges, &copy, &data, ranges.total, &file);
        if (!done) Py_CLEAR(list);
        Py_XDECREF(done);
    }
done:
    PyMem_Free(targets);
    free_ranges(&ranges);
    PyBuffer_Release(&data);
    return list;
}

#include "_columns.h"
#include "_orders.h"
#include "_shards.h"
#include "_tar.h"

/* ---- Hashes ---- */

typedef struct {
    char *out; /* 8 bytes a row */
    const char *key, *data;
    const int64_t *offsets, *lengths;
    Py_ssize_t count;
    int avx2;
} Hash;

static void run_hash(const void *job) {
    const Hash *h = job;
    for (Py_ssize_t row = 0; row < h->count; row++) {
        uint64_t hash = highway_hash(h->key, h->data + h->offsets[row], h->lengths[row], h->avx2);
        memcpy(h->out + 8 * row, &hash, 8);
    }
}

static PyObject *hash_with(PyObject *module, PyObject *const *args, Py_ssize_t count, int avx2) {
    if (wrong("hash_ranges", 6, count)) return NULL;
    File file;
    if (take_file(args[5], &file)) return NULL;
    Py_buffer out, data, key;
    if (get_buffers(args[0], &out, args[1], &data)) return NULL;
    if (PyObject_GetBuffer(args[4], &key, PyBUF_SIMPLE)) {
        PyBuffer_Release(&data);
        PyBuffer_Release(&out);
        return NULL;
    }
    PyObject *result = NULL;
    Ranges ranges;
    if (take_ranges(&ranges, args[2], args[3], data.len)) goto done;
    if (key.len != 32 || out.len / 8 != ranges.count || out.len % 8) {
        PyErr_Format(PyExc_ValueError, "a key of %zd bytes, and %zd bytes for %zd hashes: expected 32, and 8 for each",
                     key.len, out.len, ranges.count);
        goto done;
    }
    Hash hash = {.out = out.buf, .key = key.buf, .data = data.buf, .offsets = ranges.offsets,
                 .lengths = ranges.lengths, .count = ranges.count, .avx2 = avx2};
    result = run_copy(module, run_hash, &hash, &data, ranges.total, &file);
done:
    free_ranges(&ranges);
    PyBuffer_Release(&key);
    PyBuffer_Release(&data);
    PyBuffer_Release(&out);
    return result;
}

/* hash_ranges(out, data, offsets, lengths, key, file) */
static PyObject *hash_ranges(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    return hash_with(module, args, count, has_avx2());
}

/* The same without AVX2, for tests. */
static PyObject *hash_ranges_portable(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    return hash_with(module, args, count, 0);
}

/* ---- LMDB ---- */

/* lmdb_nodes(out, counts, pages, numbers, page_size, header_size, size, kind) -> nodes, or -(8 * page + refusal) */
static PyObject *lmdb_nodes(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    if (wrong("lmdb_nodes", 8, count)) return NULL;
    Parse p = {.page_size = PyLong_AsLongLong(args[4]), .header_size = PyLong_AsLongLong(args[5]),
               .size = PyLong_AsLongLong(args[6]), .kind = PyLong_AsLong(args[7])};
    if (PyErr_Occurred()) return NULL;
    Py_buffer out, counts, pages;
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    if (PyObject_GetBuffer(args[1], &counts, PyBUF_WRITABLE)) goto no_counts;
    if (PyObject_GetBuffer(args[2], &pages, PyBUF_SIMPLE)) goto no_pages;
    PyObject *result = NULL;
    int64_t *numbers = copy_int64(args[3], &p.count);
    if (!numbers) goto done;
    int64_t capacity = out.len / 32;
    if (p.page_size < 256 || p.page_size > 65536 || p.page_size % 8 || (p.header_size != 16 && p.header_size != 24) ||
        pages.len / p.page_size != p.count || pages.len % p.page_size || counts.len != 8 * p.count || out.len % 32 ||
        capacity / (p.page_size / (NODE_BYTES + 2)) < p.count || (uintptr_t)out.buf % 8 || (uintptr_t)counts.buf % 8) {
        PyErr_SetString(PyExc_ValueError, "the pages and the buffers do not fit each other");
        goto done;
    }
    for (Py_ssize_t page = 0; page < p.count; page++) {
        if (numbers[page] < 0 || numbers[page] >= p.size / p.page_size) {
            outside("a page", page, p.size);
            goto done;
        }
    }
    for (int row = 0; row < 4; row++) p.out[row] = (int64_t *)out.buf + row * capacity;
    p.counts = counts.buf, p.pages = pages.buf, p.numbers = numbers;
    int64_t found;
    Py_BEGIN_ALLOW_THREADS
    found = parse_all(&p);
    Py_END_ALLOW_THREADS
    result = PyLong_FromLongLong(found);
done:
    PyMem_Free(numbers);
    PyBuffer_Release(&pages);
    PyBuffer_Release(&counts);
    PyBuffer_Release(&out);
    return result;
no_pages:
    PyBuffer_Release(&counts);
no_counts:
    PyBuffer_Release(&out);
    return NULL;
}

/* ---- The module ---- */

static PyMethodDef methods[] = {
    {"gather", (PyCFunction)(void (*)(void))gather, METH_FASTCALL, NULL},
    {"gather_ranges", (PyCFunction)(void (*)(void))gather_ranges, METH_FASTCALL, NULL},
    {"copies", (PyCFunction)(void (*)(void))copies, METH_FASTCALL, NULL},
    {"hash_ranges", (PyCFunction)(void (*)(void))hash_ranges, METH_FASTCALL, NULL},
    {"hash_ranges_portable", (PyCFunction)(void (*)(void))hash_ranges_portable, METH_FASTCALL, NULL},
    {"cut", (PyCFunction)(void (*)(void))cut, METH_FASTCALL, NULL},
    {"file_versions", (PyCFunction)(void (*)(void))file_versions, METH_FASTCALL, NULL},
    {"integers", (PyCFunction)(void (*)(void))integers, METH_FASTCALL, NULL},
    {"tar_lines", (PyCFunction)(void (*)(void))tar_lines, METH_FASTCALL, NULL},
    {"tar_open", (PyCFunction)(void (*)(void))tar_open, METH_FASTCALL, NULL},
    {"permute", (PyCFunction)(void (*)(void))permute, METH_FASTCALL, NULL},
    {"put_keys", (PyCFunction)(void (*)(void))put_keys, METH_FASTCALL, NULL},
    {"lmdb_nodes", (PyCFunction)(void (*)(void))lmdb_nodes, METH_FASTCALL, NULL},
    {0},
};

static int execute(PyObject *module) {
    State *state = PyModule_GetState(module);
    state->MapFault = PyErr_NewException("dataload.storage.core.MapFault", NULL, NULL);
    if (!state->MapFault || PyModule_AddObjectRef(module, "MapFault", state->MapFault)) return -1;
    PyType_Spec *specs[] = {&maps_spec, &tables_spec};
    for (int each = 0; each < 2; each++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[each], NULL);
        int failed = !type || PyModule_AddType(module, (PyTypeObject *)type);
        Py_XDECREF(type);
        if (failed) return -1;
    }
    return 0;
}

static int traverse(PyObject *module, visitproc visit, void *arg) {
    State *state = PyModule_GetState(module);
    if (state) Py_VISIT(state->MapFault);
    return 0;
}

static int clear(PyObject *module) {
    State *state = PyModule_GetState(module);
    if (state) Py_CLEAR(state->MapFault);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)execute},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "dataload.storage._core_c",
    .m_size = sizeof(State),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = traverse,
    .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core_c(void) { return PyModuleDef_Init(&definition); }
