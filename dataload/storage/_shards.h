/* The shard directory: maps and tables of many shards, from which a whole batch is located and copied at once.
 *
 * A place is an int64: the number of a shard times 2^44, plus an offset in its file or an index in its table. Every
 * place is checked before it is used. `Maps` holds files, `Tables` arrays of numbers; both are empty at first, and take
 * 32 and 8 bytes for a shard that is not used. Included by _core.c.
 */
#include <sys/mman.h>
#include <time.h>

#define PLACE_BITS 44
#define MOST_SHARDS ((int64_t)1 << 19)
#define SHARD(place) ((place) >> PLACE_BITS)
#define WITHIN(place) ((place) & (((int64_t)1 << PLACE_BITS) - 1))
#define SECOND 1000000000LL
#define FEW_SHARDS 8 /* each read checks their files; with more shards, files are checked once a second */

#ifdef Py_GIL_DISABLED
#define LOCK(object) Py_BEGIN_CRITICAL_SECTION(object)
#define UNLOCK() Py_END_CRITICAL_SECTION()
#else /* the GIL is held */
#define LOCK(object) {
#define UNLOCK() }
#endif

static int64_t now(void) {
    struct timespec found;
    clock_gettime(CLOCK_MONOTONIC, &found);
    return found.tv_sec * SECOND + found.tv_nsec;
}

static int64_t parse_shard(PyObject *given, Py_ssize_t shards) {
    int64_t shard = PyLong_AsLongLong(given);
    if (PyErr_Occurred()) return -1;
    if (shard >= 0 && shard < shards) return shard;
    PyErr_Format(PyExc_ValueError, "shard %lld of %zd", (long long)shard, shards);
    return -1;
}

/* Parse the only argument of a constructor, the number of shards; -1 with an exception. */
static int64_t parse_shards(PyObject *args) {
    long long shards;
    if (!PyArg_ParseTuple(args, "L", &shards)) return -1;
    if (shards >= 0 && shards <= MOST_SHARDS) return shards;
    PyErr_Format(PyExc_ValueError, "%lld shards: a directory has 0 to %lld", shards, (long long)MOST_SHARDS);
    return -1;
}

static PyObject *make(PyTypeObject *type) { return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0); }

/* ---- Maps ---- */

typedef struct Map {
    Span span; /* the first, so that a pointer to it is one to the map */
    int64_t shard;
    long long changed; /* when its file was changed last */
    dev_t device;
    ino_t inode;
    Py_buffer view; /* plain memory instead of a file; its `obj` is NULL otherwise */
    struct Map *next; /* that was dropped before it */
    char path[];
} Map;

/* What a read needs of a map: all of it in one or two lines of the cache, which the next shards share. */
typedef struct {
    const char *start;
    int64_t size;
    atomic_llong looked; /* when the file was looked at last */
    Map *map;            /* NULL where there is none */
} Entry;

/* A map that was dropped may be in use by copies that began before. So copies are counted by turns, of which there are
 * two, and a new turn begins when the copies of the turn before have ended: nothing uses what was dropped in that one. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t shards;
    Entry *entries;
    int turn;
    Py_ssize_t copies[2]; /* in progress, of each turn */
    Map *dropped[2];
} Maps;

static void free_map(Map *map) {
    if (map->view.obj) PyBuffer_Release(&map->view);
    else if (map->span.start < map->span.end) munmap((void *)map->span.start, map->span.end - map->span.start);
    free(map);
}

/* Free the maps that no copy can use. Called with the lock. */
static void free_dropped(Maps *self) {
    while ((self->dropped[0] || self->dropped[1]) && !self->copies[!self->turn]) {
        self->turn = !self->turn;
        Map *map = self->dropped[self->turn], *next;
        self->dropped[self->turn] = NULL; /* first: to release plain memory may run Python code, which may drop maps */
        for (; map; map = next) {
            next = map->next;
            free_map(map);
        }
    }
}

static PyObject *maps_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    int64_t shards = parse_shards(args);
    Maps *self = shards < 0 ? NULL : (Maps *)make(type);
    if (!self) return NULL;
    if (!(self->entries = PyMem_Calloc(shards + 1, sizeof *self->entries))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->shards = shards;
    return (PyObject *)self;
}

static void maps_dealloc(PyObject *object) {
    Maps *self = (Maps *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t shard = 0; shard < self->shards; shard++)
        if (self->entries[shard].map) free_map(self->entries[shard].map);
    PyMem_Free(self->entries);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static void set_map(PyObject *object, int64_t shard, Map *map) {
    Maps *self = (Maps *)object;
    LOCK(object)
    Entry *entry = &self->entries[shard];
    Map *earlier = entry->map;
    entry->map = map;
    entry->start = map ? map->span.start : NULL;
    entry->size = map ? map->span.end - map->span.start : 0;
    /* There is nothing to look at in plain memory. */
    atomic_store_explicit(&entry->looked, map && map->view.obj ? INT64_MAX : now(), memory_order_relaxed);
    if (earlier) {
        earlier->next = self->dropped[self->turn];
        self->dropped[self->turn] = earlier;
        free_dropped(self);
    }
    UNLOCK()
}

/* Map a file; NULL with errno. */
static Map *map_file(int64_t shard, int descriptor, const char *path, int64_t size, const struct stat *found) {
    size_t length = strlen(path) + 1;
    Map *map = calloc(1, sizeof(Map) + length);
    if (!map) return NULL;
    void *data = size ? mmap(NULL, size, PROT_READ, MAP_SHARED, descriptor, 0) : "";
    if (data == MAP_FAILED) {
        free(map);
        return NULL;
    }
    map->span = (Span){data, (const char *)data + size};
    map->shard = shard;
    map->changed = found->st_mtim.tv_sec * SECOND + found->st_mtim.tv_nsec;
    map->device = found->st_dev, map->inode = found->st_ino;
    memcpy(map->path, path, length);
    return map;
}

/* put(shard, descriptor, path, size, changed): map the file, which may be closed afterwards. `changed` is when it was
 * changed last, in ns. */
static PyObject *maps_put(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Maps *self = (Maps *)object;
    if (wrong("put", 5, count)) return NULL;
    int64_t shard = parse_shard(args[0], self->shards);
    int descriptor = PyLong_AsLong(args[1]);
    int64_t size = PyLong_AsLongLong(args[3]);
    long long changed = PyLong_AsLongLong(args[4]);
    char *path = PyErr_Occurred() ? NULL : PyBytes_AsString(args[2]);
    if (!path) return NULL;
    if (size < 0 || size >> PLACE_BITS) return PyErr_Format(PyExc_ValueError, "a file of %lld bytes", (long long)size);
    struct stat found;
    Map *map = fstat(descriptor, &found) ? NULL : map_file(shard, descriptor, path, size, &found);
    if (!map) return PyErr_SetFromErrno(PyExc_OSError);
    map->changed = changed;
    set_map(object, shard, map);
    return Py_NewRef(Py_None);
}

/* Open a regular file without waiting; -1 if there is none. */
static int open_regular(const char *path, struct stat *found) {
    int descriptor = stat(path, found) || !S_ISREG(found->st_mode) ? -1 : open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (descriptor < 0 || (!fstat(descriptor, found) && S_ISREG(found->st_mode))) return descriptor;
    close(descriptor);
    return -1;
}

/* Fill the size, time of change in ns and number of a file. */
static void fill_version(int64_t *row, const struct stat *found) {
    row[0] = found->st_size;
    row[1] = found->st_mtim.tv_sec * SECOND + found->st_mtim.tv_nsec;
    row[2] = (int64_t)((uint64_t)found->st_ino ^ (uint64_t)found->st_dev << 48);
}

/* Count the paths in bytes, each but the last of which ends with a zero byte; the bytes themselves end with one. */
static Py_ssize_t count_paths(const char *paths, Py_ssize_t length) {
    Py_ssize_t count = 0;
    for (Py_ssize_t at = 0; at <= length; count++) at += strlen(paths + at) + 1;
    return count;
}

/* open(out, shards, paths): map a file as each shard, and close it. `out` has five int64 for each: its size, time of
 * change in ns and number, device and inode; zeros for one that is not a regular file, or cannot be mapped. */
static PyObject *maps_open(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Maps *self = (Maps *)object;
    char *path;
    Py_ssize_t length, shards = 0;
    Py_buffer out;
    if (wrong("open", 3, count) || PyBytes_AsStringAndSize(args[2], &path, &length)) return NULL;
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    int64_t *numbers = copy_int64(args[1], &shards);
    Map **maps = numbers ? PyMem_Calloc(shards + 1, sizeof *maps) : NULL;
    int fits = maps && out.len == 40 * shards && count_paths(path, length) == shards;
    for (Py_ssize_t row = 0; fits && row < shards; row++) fits = numbers[row] >= 0 && numbers[row] < self->shards;
    Py_BEGIN_ALLOW_THREADS
    int64_t *of = out.buf;
    for (Py_ssize_t row = 0; fits && row < shards; row++, of += 5, path += strlen(path) + 1) {
        struct stat found;
        int descriptor = open_regular(path, &found);
        memset(of, 0, 40);
        if (descriptor < 0) continue;
        if (!(found.st_size >> PLACE_BITS)) maps[row] = map_file(numbers[row], descriptor, path, found.st_size, &found);
        close(descriptor);
        if (!maps[row]) continue;
        fill_version(of, &found);
        of[3] = (int64_t)found.st_dev, of[4] = (int64_t)found.st_ino;
    }
    Py_END_ALLOW_THREADS
    for (Py_ssize_t row = 0; fits && row < shards; row++)
        if (maps[row]) set_map(object, numbers[row], maps[row]);
    if (numbers && !maps) PyErr_NoMemory();
    else if (numbers && !fits) PyErr_SetString(PyExc_ValueError, "the shards, the paths and the numbers do not fit");
    PyMem_Free(maps);
    PyMem_Free(numbers);
    PyBuffer_Release(&out);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* put_memory(shard, buffer): take plain memory in place of a file. */
static PyObject *maps_put_memory(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    if (wrong("put_memory", 2, count)) return NULL;
    int64_t shard = parse_shard(args[0], ((Maps *)object)->shards);
    Map *map = shard < 0 ? NULL : calloc(1, sizeof(Map) + 1);
    if (!map) return shard < 0 ? NULL : PyErr_NoMemory();
    if (PyObject_GetBuffer(args[1], &map->view, PyBUF_SIMPLE)) {
        free(map);
        return NULL;
    }
    map->span = (Span){map->view.buf, (const char *)map->view.buf + map->view.len};
    map->shard = shard;
    set_map(object, shard, map);
    return Py_NewRef(Py_None);
}

/* drop(shard): unmap the file once no copy uses it. */
static PyObject *maps_drop(PyObject *object, PyObject *given) {
    Maps *self = (Maps *)object;
    int64_t shard = parse_shard(given, self->shards);
    if (shard < 0) return NULL;
    set_map(object, shard, NULL);
    return Py_NewRef(Py_None);
}

typedef struct {
    Maps *maps;
    int64_t *places;  /* then the address of each row */
    int64_t *lengths; /* or NULL */
    const Span **of;  /* the map of each row */
    Py_ssize_t count;
    int64_t total;
    int is_due; /* whether a look at one of the files is */
    int turn;   /* in which the copy began, or -1 */
} Rows;

static void free_rows(Rows *rows) {
    if (rows->turn >= 0) {
        LOCK(rows->maps)
        rows->maps->copies[rows->turn]--;
        free_dropped(rows->maps);
        UNLOCK()
    }
    PyMem_Free(rows->of);
    PyMem_Free(rows->lengths);
    PyMem_Free(rows->places);
}

/* Find the map of each row. Returns 0, or -1 with an exception. Called with the lock. */
static int find_maps(Rows *rows, int64_t length) {
    const Maps *maps = rows->maps;
    int64_t time = now();
    rows->is_due = maps->shards <= FEW_SHARDS;
    for (Py_ssize_t row = 0; row < rows->count; row++) {
        int64_t place = rows->places[row], shard = SHARD(place), at = WITHIN(place);
        if (place < 0 || shard >= maps->shards) {
            PyErr_Format(PyExc_ValueError, "row %zd: shard %lld of %zd", row, (long long)shard, maps->shards);
            return -1;
        }
        const Entry *entry = &maps->entries[shard];
        if (!entry->map) {
            PyErr_Format(PyExc_LookupError, "%lld", (long long)shard);
            return -1;
        }
        int64_t size = entry->size, own = rows->lengths ? rows->lengths[row] : length;
        if (own < 0 || own > size || at > size - own) {
            outside("a range", row, size);
            return -1;
        }
        if (own > PY_SSIZE_T_MAX - rows->total) {
            PyErr_SetString(PyExc_OverflowError, "the ranges are longer than any memory");
            return -1;
        }
        rows->total += own;
        rows->is_due |= time - atomic_load_explicit(&entry->looked, memory_order_relaxed) >= SECOND;
        rows->of[row] = &entry->map->span;
        rows->places[row] = (int64_t)((uintptr_t)entry->start + at);
    }
    return 0;
}

/* Take rows of one length, or of `lengths`, an array; -1 with an exception. To be freed in either case. */
static int take_rows(Rows *rows, PyObject *maps, PyObject *places, PyObject *lengths, int64_t length) {
    Py_ssize_t others = 0;
    int found;
    *rows = (Rows){.maps = (Maps *)maps, .turn = -1};
    if (!(rows->places = copy_int64(places, &rows->count))) return -1;
    if (lengths && !(rows->lengths = copy_int64(lengths, &others))) return -1;
    if (lengths && others != rows->count) {
        PyErr_Format(PyExc_ValueError, "%zd places and %zd lengths", rows->count, others);
        return -1;
    }
    if (!(rows->of = PyMem_Calloc(rows->count + 1, sizeof *rows->of))) {
        PyErr_NoMemory();
        return -1;
    }
    LOCK(maps)
    rows->turn = rows->maps->turn;
    rows->maps->copies[rows->turn]++;
    found = find_maps(rows, length);
    UNLOCK()
    return found;
}

/* Return whether a file is no longer what was mapped. One that was replaced by another is: the map keeps the old one. */
static int has_changed(const Map *map) {
    struct stat found;
    if (stat(map->path, &found) || found.st_dev != map->device || found.st_ino != map->inode) return 0;
    long long changed = found.st_mtim.tv_sec * SECOND + found.st_mtim.tv_nsec;
    return found.st_size < map->span.end - map->span.start || changed != map->changed;
}

/* file_versions(out, paths): size, time of change in ns and number of each file, as int64; zeros for one that is missing.
 * Each path but the last ends with a zero byte. */
static PyObject *file_versions(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    char *path;
    Py_ssize_t length;
    Py_buffer out;
    if (wrong("file_versions", 2, count) || PyBytes_AsStringAndSize(args[1], &path, &length)) return NULL;
    if (PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    Py_ssize_t files = count_paths(path, length);
    int fits = out.len == 24 * files || (!out.len && !length);
    Py_BEGIN_ALLOW_THREADS
    int64_t *row = out.buf;
    for (char *end = (char *)out.buf + out.len; fits && (char *)row < end; row += 3, path += strlen(path) + 1) {
        struct stat found;
        if (stat(path, &found)) memset(row, 0, 24);
        else fill_version(row, &found);
    }
    Py_END_ALLOW_THREADS
    if (!fits) PyErr_Format(PyExc_ValueError, "versions of %zd files do not fill %zd bytes", files, out.len);
    PyBuffer_Release(&out);
    return fits ? Py_NewRef(Py_None) : NULL;
}

/* Look at files that were not looked at for a second, or at all; return the first row whose file has changed, or -1. */
static Py_ssize_t look_at(const Rows *rows, int all) {
    int64_t time = now(), interval = all || rows->maps->shards <= FEW_SHARDS ? 1 : SECOND;
    for (Py_ssize_t row = 0; row < rows->count; row++) {
        const Map *map = (const Map *)rows->of[row];
        atomic_llong *looked = &rows->maps->entries[map->shard].looked; /* of a later map, if this one was dropped */
        if (time - atomic_load_explicit(looked, memory_order_relaxed) < interval) continue;
        if (has_changed(map)) return row;
        atomic_store_explicit(looked, time, memory_order_relaxed);
    }
    return -1;
}

/* Call run(job), which copies the rows, then look at their files; -1 with an exception. */
static int run_on_maps(PyObject *maps, void (*run)(const void *), const void *job, const Rows *rows, int all) {
    if (install_handler()) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    Py_ssize_t row = 0;
    int64_t fault;
    Py_BEGIN_ALLOW_THREADS
    fault = run_guarded(run, job, rows->of, rows->count, &row);
    if (fault < 0) {
        row = rows->is_due || all ? look_at(rows, all) : -1;
        fault = row < 0 ? -1 : 0;
    }
    Py_END_ALLOW_THREADS
    if (fault < 0) return 0;
    State *state = PyType_GetModuleState(Py_TYPE(maps));
    PyErr_Format(state->MapFault, "%lld %lld", (long long)((const Map *)rows->of[row])->shard, (long long)fault);
    return -1;
}

/* Copy rows one after another to a buffer, which they fill. */
static PyObject *copy_rows(PyObject *maps, PyObject *to, PyObject *places, PyObject *lengths, int64_t length) {
    Py_buffer out;
    if (PyObject_GetBuffer(to, &out, PyBUF_WRITABLE)) return NULL;
    PyObject *result = NULL;
    Rows rows;
    if (take_rows(&rows, maps, places, lengths, length)) goto done;
    if (rows.total != out.len) {
        PyErr_Format(PyExc_ValueError, "ranges of %lld bytes do not fill %zd bytes", (long long)rows.total, out.len);
        goto done;
    }
    Copy copy = {.out = out.buf, .offsets = rows.places, .lengths = rows.lengths, .length = length,
                 .count = rows.count};
    if (!run_on_maps(maps, lengths ? run_ranges : run_gather, &copy, &rows, 0)) result = Py_NewRef(Py_None);
done:
    free_rows(&rows);
    PyBuffer_Release(&out);
    return result;
}

/* gather(out, places, length) */
static PyObject *maps_gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (wrong("gather", 3, count)) return NULL;
    int64_t length = PyLong_AsLongLong(args[2]);
    return PyErr_Occurred() ? NULL : copy_rows(self, args[0], args[1], NULL, length);
}

/* gather_ranges(out, places, lengths) */
static PyObject *maps_gather_ranges(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    return wrong("gather_ranges", 3, count) ? NULL : copy_rows(self, args[0], args[1], args[2], 0);
}

/* cut(out, places, length, starts, lengths, targets, first, mask) -> the first row that differs, or -1 */
static PyObject *maps_cut(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (wrong("cut", 8, count)) return NULL;
    volatile Py_ssize_t differs = -1;
    Cut cut = {.length = PyLong_AsLongLong(args[2]), .differs = &differs};
    Py_buffer out;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &out, PyBUF_WRITABLE)) return NULL;
    Rows rows;
    int failed = take_rows(&rows, self, args[1], NULL, cut.length);
    cut.offsets = rows.places, cut.count = rows.count;
    failed = failed || take_cut(&cut, &out, args + 3) || run_on_maps(self, run_cut, &cut, &rows, 0);
    free_cut(&cut);
    free_rows(&rows);
    PyBuffer_Release(&out);
    return failed ? NULL : PyLong_FromSsize_t(differs);
}

static void run_nothing(const void *job) { (void)job; }

/* look(places): look at the files of these places, however recently they were looked at. */
static PyObject *maps_look(PyObject *self, PyObject *places) {
    Rows rows;
    int failed = take_rows(&rows, self, places, NULL, 0) || run_on_maps(self, run_nothing, NULL, &rows, 1);
    free_rows(&rows);
    return failed ? NULL : Py_NewRef(Py_None);
}

static void run_will_need(const void *job) {
    const Rows *rows = job;
    int64_t page = sysconf(_SC_PAGESIZE);
    for (Py_ssize_t row = 0; row < rows->count; row++) {
        uintptr_t from = (uintptr_t)rows->places[row], start = from - from % page;
        madvise((void *)start, from - start + rows->lengths[row], MADV_WILLNEED);
    }
}

/* will_need(places, lengths): ask the kernel to read ranges ahead. */
static PyObject *maps_will_need(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (wrong("will_need", 2, count)) return NULL;
    Rows rows;
    int failed = take_rows(&rows, self, args[0], args[1], 0) || run_on_maps(self, run_will_need, &rows, &rows, 0);
    free_rows(&rows);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef maps_methods[] = {
    {"put", (PyCFunction)(void (*)(void))maps_put, METH_FASTCALL, NULL},
    {"open", (PyCFunction)(void (*)(void))maps_open, METH_FASTCALL, NULL},
    {"put_memory", (PyCFunction)(void (*)(void))maps_put_memory, METH_FASTCALL, NULL},
    {"drop", maps_drop, METH_O, NULL},
    {"gather", (PyCFunction)(void (*)(void))maps_gather, METH_FASTCALL, NULL},
    {"gather_ranges", (PyCFunction)(void (*)(void))maps_gather_ranges, METH_FASTCALL, NULL},
    {"cut", (PyCFunction)(void (*)(void))maps_cut, METH_FASTCALL, NULL},
    {"look", maps_look, METH_O, NULL},
    {"will_need", (PyCFunction)(void (*)(void))maps_will_need, METH_FASTCALL, NULL},
    {0},
};

static PyType_Slot maps_slots[] = {
    {Py_tp_new, (void *)maps_new}, {Py_tp_dealloc, (void *)maps_dealloc}, {Py_tp_methods, maps_methods}, {0, NULL},
};

static PyType_Spec maps_spec = {
    .name = "dataload.storage._core_c.Maps", .basicsize = sizeof(Maps), .flags = Py_TPFLAGS_DEFAULT, .slots = maps_slots,
};

/* ---- Tables ---- */

typedef struct {
    const void *numbers;   /* those of the view, */
    int64_t start, stride; /* or computed from these, */
    int64_t count;
    int itemsize;
    int users;             /* shards, and `last` */
    char kind;             /* of this type of struct; 0 if they are computed */
    char is_view;
    Py_buffer view;        /* or the numbers, if they are few */
} Table;

#define FEW_BYTES 4096 /* of numbers, which are copied: that saves a miss of the cache */

typedef struct {
    PyObject_HEAD
    Py_ssize_t shards;
    Table **tables; /* NULL where there is none */
    Table *last;    /* that was put, which shards with equal numbers share: one table stays in the cache */
} Tables;

static void release_table(Table *table) {
    if (!table || --table->users) return;
    if (table->is_view) PyBuffer_Release(&table->view);
    PyMem_Free(table);
}

static int are_equal(const Table *one, const Table *other) {
    if (!one || one->is_view || other->is_view || one->kind != other->kind || one->count != other->count) return 0;
    if (!one->kind) return one->start == other->start && one->stride == other->stride;
    return one->itemsize == other->itemsize && !memcmp(one->numbers, other->numbers, one->count * one->itemsize);
}

static PyObject *tables_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    (void)keywords;
    int64_t shards = parse_shards(args);
    Tables *self = shards < 0 ? NULL : (Tables *)make(type);
    if (!self) return NULL;
    if (!(self->tables = PyMem_Calloc(shards + 1, sizeof *self->tables))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    self->shards = shards;
    return (PyObject *)self;
}

static void tables_dealloc(PyObject *object) {
    Tables *self = (Tables *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t shard = 0; shard < self->shards; shard++) release_table(self->tables[shard]);
    release_table(self->last);
    PyMem_Free(self->tables);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyObject *put_table(Tables *self, int64_t shard, Table *given) {
    int copies = given->is_view && given->view.len <= FEW_BYTES;
    Table *table = PyMem_Malloc(sizeof *table + (copies ? given->view.len : 0)), *before;
    if (table) *table = *given;
    if (table && copies) {
        table->is_view = 0;
        table->numbers = memcpy(&table->view, given->numbers, given->view.len);
    }
    if (given->is_view && (!table || copies)) PyBuffer_Release(&given->view);
    if (!table) return PyErr_NoMemory();
    table->users = 1;
    LOCK(self)
    if (are_equal(self->last, table)) {
        release_table(table);
        table = self->last;
    } else {
        release_table(self->last);
        self->last = table;
    }
    table->users++;
    before = self->tables[shard];
    self->tables[shard] = table;
    release_table(before);
    UNLOCK()
    return Py_NewRef(Py_None);
}

/* put(shard, array): the numbers come from an array of integers of native byte order, in C order. */
static PyObject *tables_put(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Tables *self = (Tables *)object;
    if (wrong("put", 2, count)) return NULL;
    int64_t shard = parse_shard(args[0], self->shards);
    Table table = {.is_view = 1};
    if (shard < 0 || PyObject_GetBuffer(args[1], &table.view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) return NULL;
    const char *format = table.view.format ? table.view.format : "B";
    if (strlen(format) != 1 || !strchr("BHIiql", *format) || (uintptr_t)table.view.buf % table.view.itemsize) {
        PyErr_Format(PyExc_ValueError, "a table of numbers of type %s", format);
        PyBuffer_Release(&table.view);
        return NULL;
    }
    int is_signed = strchr("iql", *format) != NULL;
    table.kind = table.view.itemsize == 8 ? 'q' : table.view.itemsize == 4 && is_signed ? 'i' : *format;
    if (table.view.itemsize == 4 && !is_signed) table.kind = 'I';
    table.numbers = table.view.buf, table.itemsize = table.view.itemsize;
    table.count = table.view.len / table.view.itemsize;
    return put_table(self, shard, &table);
}

/* put_line(shard, start, stride, count): number i is start + i * stride. */
static PyObject *tables_put_line(PyObject *object, PyObject *const *args, Py_ssize_t count) {
    Tables *self = (Tables *)object;
    if (wrong("put_line", 4, count)) return NULL;
    int64_t shard = parse_shard(args[0], self->shards), last;
    Table table = {.start = PyLong_AsLongLong(args[1]), .stride = PyLong_AsLongLong(args[2]),
                   .count = PyLong_AsLongLong(args[3])};
    if (PyErr_Occurred()) return NULL;
    if (table.count < 0 || __builtin_mul_overflow(table.count, table.stride, &last) ||
        __builtin_add_overflow(table.start, last, &last))
        return PyErr_Format(PyExc_ValueError, "start %lld, stride %lld, count %lld", (long long)table.start,
                            (long long)table.stride, (long long)table.count);
    return put_table(self, shard, &table);
}

static int64_t number_at(const Table *table, int64_t at) {
    switch (table->kind) {
        case 0: return table->start + at * table->stride;
        case 'B': return ((const uint8_t *)table->numbers)[at];
        case 'H': return ((const uint16_t *)table->numbers)[at];
        case 'I': return ((const uint32_t *)table->numbers)[at];
        case 'i': return ((const int32_t *)table->numbers)[at];
        default: return ((const int64_t *)table->numbers)[at];
    }
}

/* Return how many of the ascending numbers of a table are at most `value`. */
static int64_t count_until(const Table *table, int64_t value) {
    int64_t low = 0, high = table->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (number_at(table, middle) <= value) low = middle + 1;
        else high = middle;
    }
    return low;
}

typedef struct {
    int64_t *places; /* replaced by what is found */
    Py_ssize_t count;
    int search;
    int64_t scale;  /* by which numbers are multiplied; they become places, */
    int is_place;   /* if they are not negative */
} Lookup;

static const Table *table_of(const Tables *self, int64_t place) {
    return place >= 0 && SHARD(place) < self->shards ? self->tables[SHARD(place)] : NULL;
}

/* Prefetch the tables of a block of rows. Places need not be valid. */
static void prefetch_tables(Table *const *tables, Py_ssize_t shards, const int64_t *places, Py_ssize_t count) {
    for (Py_ssize_t row = 0; row < count; row++)
        if ((uint64_t)SHARD(places[row]) < (uint64_t)shards) __builtin_prefetch(tables + SHARD(places[row]));
    for (Py_ssize_t row = 0; row < count; row++)
        if ((uint64_t)SHARD(places[row]) < (uint64_t)shards) __builtin_prefetch(tables[SHARD(places[row])]);
}

/* Replace the places of a block of rows by numbers; -1 with an exception. Called with the lock. */
static int look_up(const Tables *self, const Lookup *l, Py_ssize_t start) {
    int64_t *places = l->places + start, numbers[BLOCK];
    const Table *tables[BLOCK];
    Py_ssize_t count = l->count - start < BLOCK ? l->count - start : BLOCK, row;
    if (self->shards > 1) prefetch_tables(self->tables, self->shards, places, count);
    for (row = 0; row < count; row++) {
        tables[row] = table_of(self, places[row]);
        if (!tables[row] || (!l->search && WITHIN(places[row]) >= tables[row]->count)) {
            PyErr_Format(PyExc_IndexError, "row %zd: there is no number at %lld of shard %lld", start + row,
                         (long long)WITHIN(places[row]), (long long)SHARD(places[row]));
            return -1;
        }
    }
    /* Little else, so that the processor waits for many numbers at once. */
    for (row = 0; row < count && !l->search; row++) numbers[row] = number_at(tables[row], WITHIN(places[row]));
    for (row = 0; row < count; row++) {
        int64_t at = WITHIN(places[row]), number = l->search ? count_until(tables[row], at) : numbers[row];
        if (__builtin_mul_overflow(number, l->scale, &number) || (l->is_place && number >> PLACE_BITS > 0)) {
            PyErr_Format(PyExc_ValueError, "row %zd: the number at %lld of shard %lld is too large", start + row,
                         (long long)at, (long long)SHARD(places[row]));
            return -1;
        }
        places[row] = l->is_place && number >= 0 ? (places[row] - at) | number : number;
    }
    return 0;
}

static PyObject *run_lookup(PyObject *self, PyObject *to, PyObject *places, Lookup *lookup) {
    Py_buffer out;
    int failed = 1;
    if (PyObject_GetBuffer(to, &out, PyBUF_WRITABLE)) return NULL;
    if ((lookup->places = copy_int64(places, &lookup->count))) {
        if (out.len != lookup->count * 8) {
            PyErr_Format(PyExc_ValueError, "%zd numbers do not fill %zd bytes", lookup->count, out.len);
        } else {
            LOCK(self)
            failed = 0;
            for (Py_ssize_t row = 0; row < lookup->count && !failed; row += BLOCK)
                failed = look_up((Tables *)self, lookup, row);
            UNLOCK()
            if (!failed) memcpy(out.buf, lookup->places, out.len);
        }
        PyMem_Free(lookup->places);
    }
    PyBuffer_Release(&out);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* take(out, places, scale, is_place): the number at each place, times `scale`; as a place in the same shard, unless it is
 * negative. */
static PyObject *tables_take(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (wrong("take", 4, count)) return NULL;
    Lookup lookup = {.scale = PyLong_AsLongLong(args[2]), .is_place = PyObject_IsTrue(args[3])};
    return PyErr_Occurred() ? NULL : run_lookup(self, args[0], args[1], &lookup);
}

/* search(out, places): how many numbers of the shard are at most the index in the place; as a place. */
static PyObject *tables_search(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    Lookup lookup = {.search = 1, .scale = 1, .is_place = 1};
    return wrong("search", 2, count) ? NULL : run_lookup(self, args[0], args[1], &lookup);
}

static PyMethodDef tables_methods[] = {
    {"put", (PyCFunction)(void (*)(void))tables_put, METH_FASTCALL, NULL},
    {"put_line", (PyCFunction)(void (*)(void))tables_put_line, METH_FASTCALL, NULL},
    {"take", (PyCFunction)(void (*)(void))tables_take, METH_FASTCALL, NULL},
    {"search", (PyCFunction)(void (*)(void))tables_search, METH_FASTCALL, NULL},
    {0},
};

static PyType_Slot tables_slots[] = {
    {Py_tp_new, (void *)tables_new}, {Py_tp_dealloc, (void *)tables_dealloc}, {Py_tp_methods, tables_methods}, {0, NULL},
};

static PyType_Spec tables_spec = {
    .name = "dataload.storage._core_c.Tables", .basicsize = sizeof(Tables), .flags = Py_TPFLAGS_DEFAULT,
    .slots = tables_slots,
};
