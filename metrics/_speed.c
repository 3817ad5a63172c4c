/* The hot loops of the StatsD daemon in C. Optional: line_counts.py and sketch.py do the same in Python.
 *
 * Tally       counts equal lines of datagrams, takes plain timers out as numbers, and hands over ordered lines
 * look_through  bytes of datagrams, and whether any of them may be numbered
 * count_bins  the bins of a sketch
 *
 * All of it runs with the interpreter lock held: a call takes some 50 microseconds.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/random.h>

/* -- hashing: a multiplication per eight bytes, with a secret, so that nobody can choose lines that collide */

static uint64_t secret[2];

static inline uint64_t mix(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint64_t read_8(const char *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static inline uint64_t read_4(const char *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

/* Sixteen bytes at a time; the last ones may be read twice, which the size in it makes harmless. */
static inline uint64_t hash_bytes(const char *at, size_t size)
{
    uint64_t hash = secret[0] ^ size, low = 0, high = 0;
    if (size > 16) {
        const char *last = at + size - 16;
        for (; at < last; at += 16)
            hash = mix(read_8(at) ^ secret[1], read_8(at + 8) ^ hash);
        low = read_8(last);
        high = read_8(last + 8);
    } else if (size >= 8) {
        low = read_8(at);
        high = read_8(at + size - 8);
    } else if (size >= 4) {
        low = read_4(at);
        high = read_4(at + size - 4);
    } else if (size > 0) {
        low = (uint64_t)(unsigned char)at[0] << 16 | (uint64_t)(unsigned char)at[size / 2] << 8
            | (unsigned char)at[size - 1];
    }
    return mix(low ^ secret[1], high ^ hash);
}

/* -- a table of byte strings, in the order in which they came */

typedef struct {
    uint64_t hash;
    size_t at;
    size_t size;
} Key;

typedef struct {
    Key *keys;
    uint32_t *slots; /* index of a key plus one; 0 is free */
    char *bytes;
    size_t count, room, slot_count, bytes_used, bytes_room;
} Table;

static void table_free(Table *table)
{
    PyMem_Free(table->keys);
    PyMem_Free(table->slots);
    PyMem_Free(table->bytes);
    memset(table, 0, sizeof *table);
}

static int table_grow(Table *table)
{
    size_t room = table->room ? table->room * 2 : 32;
    if (room > UINT32_MAX / 4) {
        PyErr_NoMemory();
        return -1;
    }
    Key *keys = PyMem_Realloc(table->keys, room * sizeof *keys);
    if (!keys) {
        PyErr_NoMemory();
        return -1;
    }
    table->keys = keys;
    uint32_t *slots = PyMem_Calloc(room * 2, sizeof *slots);
    if (!slots) {
        PyErr_NoMemory();
        return -1;
    }
    size_t mask = room * 2 - 1;
    for (size_t i = 0; i < table->count; i++) {
        size_t slot = keys[i].hash & mask;
        while (slots[slot])
            slot = (slot + 1) & mask;
        slots[slot] = (uint32_t)(i + 1);
    }
    PyMem_Free(table->slots);
    table->slots = slots;
    table->slot_count = room * 2;
    table->room = room;
    return 0;
}

/* The index of a key, or -1 */
static inline Py_ssize_t table_find(const Table *table, uint64_t hash, const char *at, size_t size)
{
    if (!table->slot_count)
        return -1;
    size_t mask = table->slot_count - 1;
    for (size_t slot = hash & mask; table->slots[slot]; slot = (slot + 1) & mask) {
        const Key *key = &table->keys[table->slots[slot] - 1];
        if (key->hash == hash && key->size == size && !memcmp(table->bytes + key->at, at, size))
            return (Py_ssize_t)table->slots[slot] - 1;
    }
    return -1;
}

/* Put in a key that is not there; its index, or -1 with an exception */
static Py_ssize_t table_insert(Table *table, uint64_t hash, const char *at, size_t size)
{
    if (table->count == table->room && table_grow(table) < 0)
        return -1;
    if (!table->bytes || table->bytes_used + size > table->bytes_room) {
        size_t room = table->bytes_room ? table->bytes_room : 1024;
        while (room < table->bytes_used + size)
            room *= 2;
        char *bytes = PyMem_Realloc(table->bytes, room);
        if (!bytes) {
            PyErr_NoMemory();
            return -1;
        }
        table->bytes = bytes;
        table->bytes_room = room;
    }
    memcpy(table->bytes + table->bytes_used, at, size);
    Key *key = &table->keys[table->count];
    key->hash = hash;
    key->at = table->bytes_used;
    key->size = size;
    table->bytes_used += size;
    size_t mask = table->slot_count - 1;
    size_t slot = hash & mask;
    while (table->slots[slot])
        slot = (slot + 1) & mask;
    table->slots[slot] = (uint32_t)(table->count + 1);
    return (Py_ssize_t)table->count++;
}

static PyObject *key_bytes(const Table *table, const Key *key)
{
    return PyBytes_FromStringAndSize(table->bytes + key->at, (Py_ssize_t)key->size);
}

/* -- Tally */

typedef struct {
    double *values;
    size_t count, room;
} Values;

enum { MS, H, D, KINDS };

typedef struct {
    PyObject_HEAD
    Table lines;
    uint64_t *counts;
    size_t counts_room;
    Table names[KINDS];
    Values *timers[KINDS];
    size_t timers_room[KINDS];
} Tally;

static PyObject *tally_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    return type->tp_alloc(type, 0);
}

static void tally_dealloc(Tally *self)
{
    table_free(&self->lines);
    PyMem_Free(self->counts);
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t i = 0; i < self->names[kind].count && i < self->timers_room[kind]; i++)
            PyMem_Free(self->timers[kind][i].values);
        PyMem_Free(self->timers[kind]);
        table_free(&self->names[kind]);
    }
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static int tally_count(Tally *self, const char *line, size_t size, uint64_t hash)
{
    if (self->lines.count == self->counts_room) {
        size_t room = self->counts_room ? self->counts_room * 2 : 32;
        uint64_t *counts = PyMem_Realloc(self->counts, room * sizeof *counts);
        if (!counts) {
            PyErr_NoMemory();
            return -1;
        }
        self->counts = counts;
        self->counts_room = room;
    }
    Py_ssize_t index = table_insert(&self->lines, hash, line, size);
    if (index < 0)
        return -1;
    self->counts[index] = 1;
    return 0;
}

static int timer_add(Tally *self, int kind, const char *name, size_t size, double value)
{
    Table *names = &self->names[kind];
    uint64_t hash = hash_bytes(name, size);
    Py_ssize_t index = table_find(names, hash, name, size);
    if (index < 0) {
        if (names->count == self->timers_room[kind]) {
            size_t room = names->count ? names->count * 2 : 32;
            Values *timers = PyMem_Realloc(self->timers[kind], room * sizeof *timers);
            if (!timers) {
                PyErr_NoMemory();
                return -1;
            }
            memset(timers + names->count, 0, (room - names->count) * sizeof *timers);
            self->timers[kind] = timers;
            self->timers_room[kind] = room;
        }
        index = table_insert(names, hash, name, size);
        if (index < 0)
            return -1;
    }
    Values *found = &self->timers[kind][index];
    if (found->count == found->room) {
        size_t room = found->room ? found->room * 2 : 8;
        double *values = PyMem_Realloc(found->values, room * sizeof *values);
        if (!values) {
            PyErr_NoMemory();
            return -1;
        }
        found->values = values;
        found->room = room;
    }
    found->values[found->count++] = value;
    return 0;
}

static const double POWERS[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
/* Longer numbers are left to the parser. */
#define MAX_DIGITS 40
/* Longer lines too, which it may refuse. */
#define MAX_TIMER_LINE 1024

/* A number `12` or `12.5`, nothing else, in all of `at` to `end`; -1 if it is anything else */
static double plain_number(const char *at, const char *end)
{
    if (at == end || end - at > MAX_DIGITS)
        return -1;
    const char *begin = at;
    uint64_t digits = 0;
    int fraction = 0;
    if (*at == '0' && end - at > 1 && at[1] != '.')
        return -1;
    while (at < end && *at >= '0' && *at <= '9')
        digits = digits * 10 + (uint64_t)(*at++ - '0');
    if (at == begin)
        return -1;
    if (at < end) {
        if (*at++ != '.' || at == end)
            return -1;
        const char *point = at;
        while (at < end && *at >= '0' && *at <= '9')
            digits = digits * 10 + (uint64_t)(*at++ - '0');
        if (at != end)
            return -1;
        fraction = (int)(end - point);
    }
    /* Both exact as a double: then the quotient is the nearest double, as the standard asks of division. */
    if (end - begin <= 19 && digits <= (UINT64_C(1) << 53) && fraction <= 22)
        return (double)digits / POWERS[fraction];
    char copy[MAX_DIGITS + 1];
    memcpy(copy, begin, (size_t)(end - begin));
    copy[end - begin] = 0;
    double value = PyOS_string_to_double(copy, NULL, NULL);
    if (value < 0)
        PyErr_Clear();
    return value;
}

/* 1 if the line was a plain timer and is taken, 0 if not, -1 with an exception */
static int take_timer(Tally *self, const char *line, size_t size)
{
    int kind;
    if (size < 4 || size > MAX_TIMER_LINE || !memcmp(line, "_e{", 3) || !memcmp(line, "_sc|", 4))
        return 0;
    const char *end = line + size;
    if (end[-1] == 's' && end[-2] == 'm' && end[-3] == '|')
        kind = MS, end -= 3;
    else if (end[-1] == 'h' && end[-2] == '|')
        kind = H, end -= 2;
    else if (end[-1] == 'd' && end[-2] == '|')
        kind = D, end -= 2;
    else
        return 0;
    const char *colon = memchr(line, ':', (size_t)(end - line));
    if (!colon)
        return 0;
    double value = plain_number(colon + 1, end);
    if (value < 0)
        return 0;
    return timer_add(self, kind, line, (size_t)(colon - line), value) < 0 ? -1 : 1;
}

static inline int is_ordered(const char *line, size_t size)
{
    return (size >= 3 && !memcmp(line, "_e{", 3)) || (size >= 4 && !memcmp(line, "_sc|", 4))
        || memmem(line, size, "|g", 2) != NULL;
}

static int take_line(Tally *self, const char *line, size_t size, PyObject *ordered)
{
    char last = line[size - 1];
    if (last == 's' || last == 'h' || last == 'd') {
        int taken = take_timer(self, line, size);
        if (taken)
            return taken < 0 ? -1 : 0;
    }
    uint64_t hash = hash_bytes(line, size);
    Py_ssize_t index = table_find(&self->lines, hash, line, size);
    if (index >= 0) {
        self->counts[index]++;
        return 0;
    }
    if (!is_ordered(line, size))
        return tally_count(self, line, size, hash);
    PyObject *copy = PyBytes_FromStringAndSize(line, (Py_ssize_t)size);
    if (!copy)
        return -1;
    int result = PyList_Append(ordered, copy);
    Py_DECREF(copy);
    return result;
}

static PyObject *tally_add(Tally *self, PyObject *args)
{
    PyObject *payloads, *ordered;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &payloads, &PyList_Type, &ordered))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(payloads); i++) {
        PyObject *payload = PyList_GET_ITEM(payloads, i);
        if (!PyBytes_Check(payload)) {
            PyErr_SetString(PyExc_TypeError, "payloads must be bytes");
            return NULL;
        }
        const char *at = PyBytes_AS_STRING(payload);
        const char *end = at + PyBytes_GET_SIZE(payload);
        while (at < end) {
            const char *newline = memchr(at, '\n', (size_t)(end - at));
            const char *line_end = newline ? newline : end;
            if (line_end > at && take_line(self, at, (size_t)(line_end - at), ordered) < 0)
                return NULL;
            at = line_end + 1;
        }
    }
    Py_RETURN_NONE;
}

static PyObject *tally_lines(Tally *self, PyObject *args)
{
    Py_ssize_t at, limit;
    if (!PyArg_ParseTuple(args, "nn", &at, &limit))
        return NULL;
    Py_ssize_t end = (Py_ssize_t)self->lines.count;
    at = at < 0 ? 0 : at > end ? end : at;
    end = limit < end - at ? at + (limit < 0 ? 0 : limit) : end;
    PyObject *list = PyList_New(end - at);
    for (Py_ssize_t i = at; list && i < end; i++) {
        PyObject *line = key_bytes(&self->lines, &self->lines.keys[i]);
        PyObject *pair = line ? Py_BuildValue("(NK)", line, (unsigned long long)self->counts[i]) : NULL;
        if (!pair)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i - at, pair);
    }
    return list;
}

static PyObject *float_list(const Values *values)
{
    PyObject *list = PyList_New((Py_ssize_t)values->count);
    for (size_t i = 0; list && i < values->count; i++) {
        PyObject *value = PyFloat_FromDouble(values->values[i]);
        if (!value)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, value);
    }
    return list;
}

static PyObject *tally_timer(Tally *self, PyObject *args)
{
    int kind;
    Py_ssize_t at;
    if (!PyArg_ParseTuple(args, "in", &kind, &at))
        return NULL;
    if (kind < 0 || kind >= KINDS || at < 0 || at >= (Py_ssize_t)self->names[kind].count)
        Py_RETURN_NONE;
    PyObject *name = key_bytes(&self->names[kind], &self->names[kind].keys[at]);
    PyObject *values = name ? float_list(&self->timers[kind][at]) : NULL;
    PyObject *cell = values ? PyTuple_Pack(2, name, values) : NULL;
    Py_XDECREF(name);
    Py_XDECREF(values);
    return cell;
}

static Py_ssize_t tally_length(Tally *self)
{
    size_t count = self->lines.count;
    for (int kind = 0; kind < KINDS; kind++)
        count += self->names[kind].count;
    return (Py_ssize_t)count;
}

static PyMethodDef tally_methods[] = {
    {"add", (PyCFunction)tally_add, METH_VARARGS, "add(payloads, ordered): count the lines of some payloads."},
    {"lines", (PyCFunction)tally_lines, METH_VARARGS,
     "lines(at, limit): some [(line, times)], in the order in which they first came."},
    {"timer", (PyCFunction)tally_timer, METH_VARARGS,
     "timer(kind, at): (name, values) of a plain timer, kind 0 ms, 1 h, 2 d; None beyond the last."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot tally_slots[] = {
    {Py_tp_new, tally_new},
    {Py_tp_dealloc, tally_dealloc},
    {Py_tp_methods, tally_methods},
    {Py_sq_length, tally_length},
    {Py_tp_doc, "Counts of equal lines, and the values of plain timers."},
    {0, NULL},
};

static PyType_Spec tally_spec = {
    .name = "brokerless.metrics._speed.Tally",
    .basicsize = sizeof(Tally),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = tally_slots,
};

/* -- sketches */

static int add_bin(PyObject *bins, long long index, long long count)
{
    PyObject *key = PyLong_FromLongLong(index);
    PyObject *had = key ? PyDict_GetItemWithError(bins, key) : NULL;
    long long before = had ? PyLong_AsLongLong(had) : 0;
    PyObject *value = !PyErr_Occurred() ? PyLong_FromLongLong(before + count) : NULL;
    int result = value ? PyDict_SetItem(bins, key, value) : -1;
    Py_XDECREF(key);
    Py_XDECREF(value);
    return result;
}

#define NEAR 4096

static PyObject *count_bins(PyObject *module, PyObject *args)
{
    PyObject *values;
    double factor;
    (void)module;
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &values, &factor))
        return NULL;
    PyObject *bins = PyDict_New();
    if (!bins)
        return NULL;
    uint32_t near[2 * NEAR] = {0};
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); i++) {
        double value = PyFloat_AsDouble(PyList_GET_ITEM(values, i));
        if (value == -1 && PyErr_Occurred())
            goto failed;
        double bin = ceil(log(value) * factor);
        if (!(value > 0) || !isfinite(bin)) {
            PyErr_SetString(PyExc_ValueError, "values must be positive and finite");
            goto failed;
        }
        long long index = (long long)bin;
        if (index >= -NEAR && index < NEAR && near[index + NEAR] < UINT32_MAX)
            near[index + NEAR]++;
        else if (add_bin(bins, index, 1) < 0)
            goto failed;
    }
    for (int i = 0; i < 2 * NEAR; i++)
        if (near[i] && add_bin(bins, i - NEAR, near[i]) < 0)
            goto failed;
    return bins;
failed:
    Py_DECREF(bins);
    return NULL;
}

/* -- datagrams as they come */

static PyObject *look_through(PyObject *module, PyObject *batch)
{
    (void)module;
    if (!PyList_Check(batch)) {
        PyErr_SetString(PyExc_TypeError, "a list of bytes is needed");
        return NULL;
    }
    Py_ssize_t bytes = 0;
    int marked = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batch); i++) {
        PyObject *datagram = PyList_GET_ITEM(batch, i);
        if (!PyBytes_Check(datagram)) {
            PyErr_SetString(PyExc_TypeError, "datagrams must be bytes");
            return NULL;
        }
        Py_ssize_t size = PyBytes_GET_SIZE(datagram);
        bytes += size;
        marked |= size >= 4 && !memcmp(PyBytes_AS_STRING(datagram), "_bl.", 4);
    }
    return Py_BuildValue("(nO)", bytes, marked ? Py_True : Py_False);
}

static PyMethodDef methods[] = {
    {"look_through", look_through, METH_O,
     "look_through(batch): bytes of all datagrams, and whether any begins with `_bl.`."},
    {"count_bins", count_bins, METH_VARARGS,
     "count_bins(values, factor): how many values are in each logarithmic bin."},
    {NULL, NULL, 0, NULL},
};

static int add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    int result = type ? PyModule_AddObjectRef(module, name, type) : -1;
    Py_XDECREF(type);
    return result;
}

static int module_exec(PyObject *module)
{
    if (getrandom(secret, sizeof secret, 0) != sizeof secret) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    secret[1] |= 1;
    return add_type(module, "Tally", &tally_spec);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_speed",
    .m_doc = "The daemon's hot loops.",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__speed(void)
{
    return PyModuleDef_Init(&module_def);
}
